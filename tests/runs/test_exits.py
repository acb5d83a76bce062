"""Code that calls exit() or raises what is no Exception does not end a run silently: the run has failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf import cli
from lightning_rlhf.interruption import Signals, from_signal
from lightning_rlhf.runs.ending import CodeEnded, failing
from tests.runs.test_going_on import TINY, project  # noqa: F401

EXITS = """\
import builtins, os
from lightning_rlhf.callbacks import RLHFCallback


def leave(how, code):
    if how == "os._exit":
        os._exit(code)
    raise getattr(builtins, how)(code)


class Leaves(RLHFCallback):
    def __init__(self, how, code=0):
        self.how, self.code = how, code

    def on_rollout_start(self, trainer, module, prompts):
        if module.control.iteration == 3:
            leave(self.how, self.code)


class Reward:
    def __init__(self, when=0):
        self.calls, self.when = 0, when

    def __call__(self, batch):
        self.calls += 1
        if self.calls == self.when:
            exit(0)
        return [0.0] * len(batch)
"""

REWARD = "+reward.terms.own={weight: 1, reward: {_target_: exits_of_a_run.Reward, when: 3}}"


def leaves(how: str, code: int = 0) -> str:
    return f"+callbacks.leaves={{_target_: exits_of_a_run.Leaves, how: {how}, code: {code}}}"


@pytest.fixture
def words(project: Path) -> list[str]:  # noqa: F811
    (project / "exits_of_a_run.py").write_text(EXITS, encoding="utf-8")
    return ["train", *TINY, "callbacks=checkpoint", "iterations=4"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (leaves("SystemExit"), "FAILED: SystemExit(0) was raised, which ends a process and not a run"),
        (leaves("SystemExit", 143), "FAILED: SystemExit(143) was raised"),
        (leaves("KeyboardInterrupt"), "FAILED: KeyboardInterrupt(0) was raised"),
        (leaves("GeneratorExit"), "FAILED: GeneratorExit(0) was raised"),
        (REWARD, "FAILED: reward term 'own': SystemExit(0)"),
    ],
)
def test_an_exit_in_own_code_is_a_failed_run(
    words: list[str], capsys: pytest.CaptureFixture, override: str, said: str
) -> None:
    assert cli.main([*words, override, "hydra.run.dir=run"]) == 1
    error = capsys.readouterr().err
    shown = error[error.index("FAILED: ") :]
    assert shown.startswith(said) and 'exits_of_a_run.py", line ' in shown
    assert "Traceback" not in error and "site-packages" not in shown
    log = Path("run/train.log").read_text(encoding="utf-8")
    assert "the run has FAILED\noutput folder: " in log and "iteration_000002.ckpt\nto go on: " in log
    if sys.version_info >= (3, 11):
        assert f"to go on: lightning-rlhf train resume={Path('run').absolute()}" in shown


def test_an_exit_is_a_failure_in_mlflow(words: list[str]) -> None:
    from mlflow import MlflowClient

    own = [word for word in words if not word.startswith("logger=")]
    assert cli.main([*own, "logger=mlflow", leaves("KeyboardInterrupt"), "hydra.run.dir=run"]) == 1
    record = json.loads(Path("run/tracking/run.json").read_text(encoding="utf-8"))
    assert MlflowClient(record["tracking_uri"]).get_run(record["run_id"]).info.status == "FAILED"


def test_a_sweep_goes_on_after_an_exit(words: list[str], capsys: pytest.CaptureFixture) -> None:
    sweep = [*words, "+callbacks.leaves._target_=exits_of_a_run.Leaves", "+callbacks.leaves.how=SystemExit"]
    assert cli.main([*sweep, "iterations=4,2", "hydra.sweep.dir=sweep", "--multirun"]) == 2
    error = capsys.readouterr().err
    assert "2 jobs, 1 of them failed\njob 0 (iterations=4): failed: SystemExit(0) was raised" in error
    assert "job 1 (iterations=2): done" in error


def test_signals_are_no_exits() -> None:
    assert from_signal(KeyboardInterrupt()) and not from_signal(SystemExit(130))
    with pytest.raises(KeyboardInterrupt), failing():
        raise KeyboardInterrupt
    with Signals(), pytest.raises(CodeEnded), failing():
        raise KeyboardInterrupt
    with pytest.raises(CodeEnded), failing():
        raise SystemExit(143)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SystemExit", "os._exit"])
def test_an_exit_in_one_of_two_processes(words: list[str], how: str) -> None:
    command = [str(Path(sys.executable).parent / "lightning-rlhf"), *words, leaves(how), "hydra.run.dir=run"]
    two = ["trainer=ddp", "trainer.devices=2"]
    done = subprocess.run([*command, *two], capture_output=True, text=True, timeout=400, env=os.environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "to go on: lightning-rlhf train resume=" in done.stderr
    wanted = "process 0: SystemExit(0) was raised" if how == "SystemExit" else "process 0 ended with exit code 0 in"
    assert wanted in done.stderr
