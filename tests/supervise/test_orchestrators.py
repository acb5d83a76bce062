"""``--once`` under SLURM and Kubernetes, as docs/supervision.md says; SLURM itself is a stand-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.supervisor import AGAIN, AGAIN_CHANGED, NEVER
from tests.runs.test_resume_command import TINY, project, record, runs_in  # noqa: F401
from tests.supervise.test_supervise import PATIENCE, state, trouble  # noqa: F401

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "supervision.md").read_text(encoding="utf-8")


def script() -> str:
    [found] = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if block.startswith("#!/bin/bash")]
    return found


def test_the_codes_of_the_page_are_those_of_the_command() -> None:
    codes = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|.*yes \|$", PAGE, re.MULTILINE) for code in row.split(",")
    }
    assert codes == {AGAIN, AGAIN_CHANGED, 138, 143}
    [requeued] = re.findall(r"^  ([\d|]+)\) scontrol requeue", script(), re.MULTILINE)
    assert {int(code) for code in requeued.split("|")} == codes
    [job] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    [ended] = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert ended["onExitCodes"]["values"] == [NEVER, 2]


@pytest.fixture
def slurm(trouble: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with the script of the docs, in which ``scontrol`` notes what it is asked to do (no SLURM here)."""
    tools = trouble / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {trouble}/requeued\n', encoding="utf-8")
    command = f'#!/bin/bash\nexec {sys.executable} -m lightning_rlhf.cli "$@"\n'
    (tools / "lightning-rlhf").write_text(command, encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (trouble / "job.sh").write_text(script(), encoding="utf-8")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "JOB_NAME": "rlhf", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NODEID", "0")
    return trouble


@pytest.mark.slow
def test_the_slurm_script_requeues_until_the_run_is_rescued(slurm: Path) -> None:
    """The same diverging run as under a supervisor that stays: same settings, then half the learning rate."""
    words = [
        *TINY,
        "module.optimizer.schedule=constant",
        "+callbacks.diverges={_target_: trouble.Diverges, above: 0.0003}",
    ]
    codes: list[int] = []
    while len(codes) < 5 and (not codes or len((slurm / "requeued").read_text().splitlines()) == len(codes)):
        codes.append(subprocess.run(["bash", "job.sh", *words], cwd=slurm, timeout=PATIENCE, check=False).returncode)
    assert codes == [AGAIN, AGAIN_CHANGED, 0]
    assert (slurm / "requeued").read_text() == "requeue 7\n" * 2
    folder = slurm / "runs" / "a"
    assert [each["changes"].get("module.actor.lr") for each in state(folder)["attempts"]] == [None, None, 0.0002]
    status, history, _ = record(folder)
    assert status == "FINISHED" and runs_in(slurm) == 1
    assert [step for step, _ in history["reward/mean"]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_preempted_job_is_requeued_and_goes_on(slurm: Path) -> None:
    words: list[Any] = ["bash", "job.sh", *TINY, "logger=none"]
    job = subprocess.Popen([*words, "iterations=100000"], cwd=slurm)
    folder, until = slurm / "runs" / "a", time.monotonic() + PATIENCE
    while (beat := Beat.read(folder / "supervise")) is None or beat.iteration < 2:
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.2)
    job.terminate()
    assert job.wait(PATIENCE) == 143
    assert (slurm / "requeued").read_text() == "requeue 7\n"
    done = max(int(path.stem.partition("_")[2]) for path in (folder / "checkpoints").glob("iteration_*.ckpt"))
    ended = subprocess.run([*words, f"iterations={done + 1}"], cwd=slurm, timeout=PATIENCE, check=False)
    assert ended.returncode == 0 and [each["class"] for each in state(folder)["attempts"]] == ["stopped", "done"]
