"""An error of one process ends all of them, and is what each of them says; the same for one that never comes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_rlhf import schema
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.distributed import first_fault
from lightning_rlhf.distributed.first_fault import PeerFailed, RanksTimedOut, broken_connection
from lightning_rlhf.distributed.launch import FILE as HANDED_OVER
from lightning_rlhf.run import run
from tests.distributed.test_launch import BIN, TINY, folder, mlflow_run  # noqa: F401
from tests.distributed.test_launch import run as command
from tests.ranks import run_ranks

HERE = "tests.distributed.test_first_fault"


class Broken(RuntimeError):
    """The fault of these tests."""


def of_rank_1() -> bool:
    return os.environ["RANK"] == "1"


class Fault(RLHFCallback):
    """Raises on rank 1 in one phase."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.breaks("building")

    def breaks(self, phase: str) -> None:
        if self.phase == phase and of_rank_1():
            raise Broken(f"broken in {phase}")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.breaks("setup")

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.breaks("rollout")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.breaks("update")

    def on_validation_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
        self.breaks("validation")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.breaks("checkpoint")


class Raises:
    """A reward that raises on rank 1; ranks exchange such an error, and all raise it."""

    def __call__(self, batch: Any) -> list[float]:
        if of_rank_1():
            raise Broken("no answer")
        return [0.0] * len(batch)


class Hangs:
    """A reward that does not return on rank 1 before rank 0 has given up."""

    def __call__(self, batch: Any) -> list[float]:
        while of_rank_1() and not Path("rank_0.pickle").exists():
            time.sleep(0.1)
        return [0.0] * len(batch)


def ended(rank: int, config: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of the error with which a run ends on this rank."""
    try:
        run(config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture
def ranks(compose: Callable[..., Any], folder: Path) -> Callable[..., list[tuple[str, str]]]:  # noqa: F811
    def of(*overrides: str) -> list[tuple[str, str]]:
        given = {word.partition("=")[0] for word in overrides}
        tiny = [word for word in TINY if word.partition("=")[0] not in given]
        words = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "iterations=1"]
        return run_ranks(ended, schema.check(compose(*words, *tiny, *overrides)), folder=folder, process_group=False)

    return of


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("phase", ["setup", "rollout", "update", "validation", "checkpoint"])
def test_all_processes_name_the_one_that_failed(ranks: Callable[..., Any], phase: str, strategy: str) -> None:
    own = f"+callbacks.fault={{_target_: {HERE}.Fault, phase: {phase}}}"
    held_out = ["data.validation_size=2"] if phase == "validation" else []
    other, faulty = ranks(own, *held_out, f"trainer={strategy}")
    assert faulty == ("Broken", f"broken in {phase}")
    assert other == ("PeerFailed", f"ended, as process 1 has failed: Broken: broken in {phase}")


def test_an_error_that_all_raise_is_recorded_as_that_of_the_one_that_had_it(
    ranks: Callable[..., Any],
    folder: Path,  # noqa: F811
) -> None:
    raises = f"+reward.terms.own={{weight: 1, reward: {{_target_: {HERE}.Raises}}}}"
    ends = ranks(raises)
    assert [kind for kind, _ in ends] == ["RewardError", "RewardError"]
    [file] = folder.rglob(first_fault.FILE)
    assert json.loads(file.read_text(encoding="utf-8"))["rank"] == 1


def test_a_process_that_never_comes(ranks: Callable[..., Any]) -> None:
    slow = f"+reward.terms.own={{weight: 1, reward: {{_target_: {HERE}.Hangs}}}}"
    waited, _ = ranks(slow, "trainer.strategy.timeout_seconds=20")
    assert waited[0] == "RanksTimedOut"
    assert "has waited in all_gather_object (reward of iteration 1) for another process" in waited[1]
    assert "longer than trainer.strategy.timeout_seconds = 20 s allows" in waited[1] and "gloo" in waited[1]


def test_errors_of_process_groups_are_told_from_others() -> None:
    gone = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    late = RuntimeError("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 15000ms for")
    nccl = dist.DistBackendError("ncclRemoteError: ... or a remote process exiting prematurely")
    assert [broken_connection(error) for error in (gone, late, nccl)] == ["gone", "timeout", "gone"]
    own = (RuntimeError("connection closed by my database"), TimeoutError("timed out"), ValueError("gloo/ closed"))
    assert not any(map(broken_connection, own))


def test_of_two_faults_one_is_the_first_and_an_earlier_start_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    first_fault.record(tmp_path, 1, Broken("a"))
    first_fault.record(tmp_path, 0, Broken("b"))
    assert first_fault.read(tmp_path) == (1, "Broken: a")
    monkeypatch.setenv("MASTER_PORT", "2")
    assert first_fault.read(tmp_path) is None and first_fault.read(tmp_path, any_start=True) == (1, "Broken: a")
    first_fault.record(tmp_path, 0, Broken("b"))
    assert first_fault.read(tmp_path) == (0, "Broken: b")
    assert [path.name for path in tmp_path.iterdir()] == [first_fault.FILE]
    first_fault.record(tmp_path / "missing", 0, Broken("c"))
    assert "process 0: its error is not recorded" in caplog.text


def test_one_process_records_nothing_and_a_killed_one_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(Broken), first_fault.named(tmp_path, 0, 1, {}):
        raise Broken
    assert not list(tmp_path.iterdir())
    gone = RuntimeError("[gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(PeerFailed, match="is gone without a word"), first_fault.named(tmp_path, 0, 2, {}):
        raise gone
    assert not list(tmp_path.iterdir()), "the cause is another process"
    assert not issubclass(RanksTimedOut, PeerFailed)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_command_shows_and_records_the_first_fault(folder: Path, launcher: str) -> None:  # noqa: F811
    """While the parts are built: rank 0 waits for rank 1 without a process group; in the update: within one."""
    phase = "update" if launcher == "own" else "building"
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "lightning_rlhf.cli"]
    words = [str(BIN / "lightning-rlhf")] if launcher == "own" else torchrun
    words += ["train", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "iterations=1", "logger=mlflow"]
    done = command(*words, f"+callbacks.fault={{_target_: {HERE}.Fault, phase: {phase}}}", "hydra.run.dir=run")
    assert done.returncode == 1, done.stderr
    assert f"broken in {phase}" in done.stderr and "Connection closed" not in done.stderr
    assert json.loads((folder / "run" / first_fault.FILE).read_text(encoding="utf-8"))["rank"] == 1
    if launcher == "own":
        assert (folder / "run" / HANDED_OVER).exists()
        tracked = mlflow_run(folder / "run")
        assert tracked.info.status == "FAILED"
        assert tracked.data.tags["failure"] == f"process 1: Broken: broken in {phase}"
        assert done.stderr.index("process 1: Broken") < done.stderr.index("process 0: ended, as process 1 has failed")
