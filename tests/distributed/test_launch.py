"""Starting several processes: numbers of devices, launchers, and real runs by the command and by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf import cli
from lightning_rlhf.distributed import launch
from lightning_rlhf.rollout.server_pool import ServersGone
from lightning_rlhf.schema import InputError
from tests.overrides import FEW, OWN_PROMPTS, SMALL_MODEL

BIN = Path(sys.executable).parent

TINY = [
    *SMALL_MODEL,
    *OWN_PROMPTS,
    *FEW,
    "logger=none",
    "callbacks=checkpoint",
    "callbacks.checkpoint.every_n_iterations=1",
]

CALLBACK = """
import os, signal
from pathlib import Path
from lightning import Callback

class Report(Callback):
    def __init__(self, die_in=None):
        self.die_in, self.iteration = die_in, 0

    def on_train_batch_start(self, trainer, module, batch, index):
        Path(f"rank_{trainer.global_rank}_of_{trainer.world_size}").write_text(trainer.default_root_dir)
        if self.die_in == module.control.iteration + 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: prompts and a callback of their own; none of the variables of a launcher."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (tmp_path / "mine.py").write_text(CALLBACK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        ({"devices": 1}, 1),
        ({"devices": 3}, 3),
        ({"devices": [2, 5]}, 2),
        ({"accelerator": "cpu", "devices": "auto"}, 1),
        ({}, 1),
    ],
)
def test_devices_of_this_machine(trainer: dict, count: int) -> None:
    assert launch.local_devices({"trainer": trainer}) == count


def test_all_devices_of_an_unknown_accelerator() -> None:
    with pytest.raises(InputError, match=r"trainer\.devices = 'auto'"):
        launch.local_devices({"trainer": {"accelerator": "abacus", "devices": "auto"}})


def test_processes_started_outside_share_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.shared_name() is None and not launch.started_outside()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert launch.started_outside() and launch.shared_name() == "torchrun-job7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(InputError, match="--rdzv-id"):
        launch.shared_name()


@pytest.mark.parametrize(("tasks", "several"), [("1", False), ("2", True)])
def test_only_several_tasks_of_slurm_are_processes_started_outside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, several: bool
) -> None:
    """Runs one after the other in a job of one task have folders of their own, and start processes themselves."""
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    assert launch.started_outside() is several
    assert launch.shared_name() == ("slurm-77" if several else None)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert launch.shared_name() == ("slurm-77-1" if several else None)


@pytest.mark.parametrize("change_folder", ["true", "false"])
def test_relative_paths_are_those_of_the_command(folder: Path, change_folder: str) -> None:
    assert cli.main(["train", "iterations=1", f"hydra.job.chdir={change_folder}", *TINY]) == 0
    assert len(list(folder.glob("outputs/*/*"))) == 1


def test_a_process_without_servers_is_no_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def train(config: object) -> None:
        raise ServersGone("no rollout server is left. http://a:1: refused")

    monkeypatch.setattr("lightning_rlhf.run.run", train)
    monkeypatch.setattr("lightning_rlhf.schema.check", dict)
    monkeypatch.setenv("RANK", "1")
    (folder / "launch.json").write_text("{}", encoding="utf-8")
    assert launch.main(str(folder / "launch.json")) == 1
    assert capsys.readouterr().err == "process 1: no rollout server is left. http://a:1: refused\n"


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
os.read(0, 1)
"""
CHILD = """
import time
from lightning_rlhf.distributed.orphans import ends_with_parent
with ends_with_parent({parent}):
    print("there", flush=True)
    time.sleep(600)
"""


def test_a_process_ends_when_its_parent_is_killed(folder: Path) -> None:
    words = [sys.executable, "-c", PARENT, CHILD.format(parent="")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, there = parent.stdout.readline().split()
        assert there == b"there" and os.path.exists(f"/proc/{int(child)}")
        parent.kill()
        _, said = parent.communicate(timeout=300)  # until the child has ended, as it has the same stderr
    assert said.decode() == f"process 0: process {parent.pid}, which started it, is gone: it ends, too\n"


def test_a_process_whose_launcher_is_gone_already_ends_at_once(folder: Path) -> None:
    words = [sys.executable, "-c", CHILD.format(parent=1)]  # it is not the parent of this one any more
    done = subprocess.run(words, capture_output=True, timeout=300)
    assert done.returncode == 1 and b"process 1, which started it, is gone" in done.stderr


# --- real processes --------------------------------------------------------------------------------------------------


def run(*command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    given = {word.partition("=")[0] for word in command}
    tiny = [word for word in TINY if word.partition("=")[0] not in given]
    return subprocess.run([*command, *tiny], capture_output=True, text=True, timeout=400, env=environment)


def mlflow_run(run_folder: Path) -> Any:
    """As the store has it."""
    from mlflow import MlflowClient

    record = json.loads((run_folder / "tracking" / "run.json").read_text(encoding="utf-8"))
    return MlflowClient(record["tracking_uri"]).get_run(record["run_id"])


@pytest.mark.slow
def test_two_processes_one_folder_a_death_and_torchrun_goes_on(folder: Path) -> None:
    """The command starts two processes, one is killed in the second iteration; torchrun resumes the run."""
    cut = run(
        str(BIN / "lightning-rlhf"),
        "train",
        "trainer=ddp",
        "trainer.devices=2",
        "iterations=3",
        "hydra.job.chdir=true",
        "+callbacks.report._target_=mine.Report",
        "+callbacks.report.die_in=2",
        "logger=mlflow",
    )
    assert cut.returncode == 1, cut.stderr
    assert "process 1 of 2 ended with signal 9" in cut.stderr
    [run_folder] = folder.glob("outputs/*/*")
    assert f"resume={run_folder}" in cut.stderr
    tracked = mlflow_run(run_folder)
    assert tracked.info.status == "FAILED" and tracked.info.end_time is not None
    assert tracked.data.tags["failure"] == "process 1 of 2 ended with signal 9, and the others were ended with it"
    reports = {file.name: file.read_text() for file in folder.glob("rank_*")}
    assert reports == dict.fromkeys(["rank_0_of_2", "rank_1_of_2"], str(run_folder)), "both ranks, one folder"
    assert [file.name for file in (run_folder / "checkpoints").glob("*.ckpt")] == ["iteration_000001.ckpt"]

    resumed = run(
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lightning_rlhf.cli",
        "train",
        "trainer=ddp",
        "trainer.devices=2",
        "iterations=3",
        f"resume={run_folder}",
        "callbacks.report.die_in=100",  # it would die again otherwise
        "branch=false",
        "logger=mlflow",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert not list(folder.glob("outputs/torchrun-*")), "it goes on in its own folder"
    assert mlflow_run(run_folder).info.status == "FINISHED"
    assert mlflow_run(run_folder).info.run_id == tracked.info.run_id
    assert {file.name for file in (run_folder / "checkpoints").iterdir()} >= {"iteration_000003.ckpt"}
    assert resumed.stdout.count("output folder") == 1, "one process speaks"
    log = (run_folder / "train.log").read_text(encoding="utf-8")
    assert log.count("iteration 3/3  reward ") == 1, "one process writes the log, too"
    assert log.count("output folder") == 2, "once of the start that failed, once of this one"
