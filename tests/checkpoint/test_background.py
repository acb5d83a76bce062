"""Checkpoints written in a thread: the same content; training waits only for a copy, and for the file at its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import KLGuard, RLHFCallback
from lightning_rlhf.checkpoint import AtomicCheckpointIO, CheckpointError, IterationCheckpoint, RNGState, latest_valid
from lightning_rlhf.checkpoint.capture import Captured
from lightning_rlhf.checkpoint.records import is_verified
from lightning_rlhf.checkpoint.writer import Writer, free_host_memory
from lightning_rlhf.interruption import Interrupted, Signals
from tests.checkpoint.test_callback import KilledHalfWay, Tiny, disk_full_after, files, names, quiet  # noqa: F401
from tests.checkpoint.test_callback import fit as fit_tiny
from tests.ranks import run_ranks
from tests.support import fit, moments, same, tiny_module, tiny_policy, weights

PATIENCE = 300
"""Seconds that a step of these tests may take at most; no result depends on it."""


class Slow(AtomicCheckpointIO):
    """Writes each file only after it was told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.began, self.at_once, self.most = threading.Event(), threading.Event(), 0, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.set()
        assert self.may.wait(PATIENCE)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.at_once -= 1


class At(RLHFCallback):
    """Does something in one event of one iteration."""

    def __init__(self, event: str, iteration: int, work: Any) -> None:
        self.iteration, self.work = iteration, work
        setattr(self, event, self._handle)

    def _handle(self, trainer: Any, module: Any, *args: Any) -> None:
        if module.control.iteration == self.iteration:
            self.work(trainer, module)


def run(
    folder: Path, *callbacks: Any, asynchronous: bool = True, iterations: int = 3, resume: Any = None, **options: Any
) -> tuple[Any, IterationCheckpoint]:
    trainer = {name: options.pop(name) for name in ("plugins", "strategy", "devices") if name in options}
    module = tiny_module(policy=tiny_policy(tie_embeddings=True), iterations=iterations)
    saver = IterationCheckpoint(folder, 1, keep=None, asynchronous=asynchronous, **options)
    fit(module, [*callbacks, RNGState(), saver], folder=folder, resume=resume, enable_checkpointing=True, **trainer)
    return module, saver


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Equal to the bit, types and order of keys included; times that were measured aside."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}.{index}")
    else:
        assert one == other, where


def test_the_content_is_that_of_a_save_that_training_waits_for(tmp_path: Path) -> None:
    """With a copy of the actor for rollbacks in it, and with tied weights, which stay one."""
    for name, asynchronous in (("a", True), ("b", False)):
        run(tmp_path / name, KLGuard(1e9), asynchronous=asynchronous)
    for name in files(1, 2, 3):
        one, other = (tmp_path / folder / name for folder in ("a", "b"))
        assert_equal(torch.load(one, weights_only=True), torch.load(other, weights_only=True))
        assert abs(one.stat().st_size - other.stat().st_size) < 500
        assert is_verified(one)


def test_training_goes_on_while_a_file_is_written_and_announces_it_afterwards(tmp_path: Path) -> None:
    """A save that training waits for would never end here. The next save waits for the one before."""
    slow, seen = Slow(), []

    def look(trainer: Any, module: Any) -> None:
        assert slow.began.wait(PATIENCE)
        saver = trainer.checkpoint_callback
        seen.append((list(tmp_path.glob("*.ckpt")), saver.last_model_path, saver.best_model_path))
        slow.may.set()

    _, saver = run(tmp_path, At("on_experience_scored", 2, look), plugins=[slow], monitor="reward/mean")
    assert seen == [([], "", "")]
    assert slow.most == 1
    assert saver.last_model_path == str(tmp_path / files(3)[0]) and saver.best_model_path


def test_weights_do_not_change_before_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy begins only when the update is about to: training waits for it."""
    run(tmp_path / "b", asynchronous=False)
    ready = threading.Event()
    copy = Captured.on_host

    def late(captured: Captured) -> dict[str, Any]:
        assert ready.wait(PATIENCE)
        ready.clear()
        return copy(captured)

    monkeypatch.setattr(Captured, "on_host", late)
    both = [At("on_experience_ready", n, lambda *_: ready.set()) for n in (2, 3)]
    last = At("on_train_batch_end", 3, lambda *_: ready.set())
    run(tmp_path / "a", *both, last)
    for name in files(1, 2):
        left, right = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("a", "b"))
        assert_equal(left["state_dict"], right["state_dict"])
        assert_equal(left["optimizer_states"], right["optimizer_states"])


def test_a_weight_that_changes_between_updates_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, copy = threading.Event(), Captured.on_host

    def late(captured: Captured) -> dict[str, Any]:
        assert changed.wait(PATIENCE)
        return copy(captured)

    def change(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.actor.lm.lm_head.weight.mul_(1)
        changed.set()

    monkeypatch.setattr(Captured, "on_host", late)
    with pytest.raises(CheckpointError, match=r"state_dict\.actor\..* was changed between two updates.*asynchronous="):
        run(tmp_path, At("on_rollout_start", 2, change))
    assert names(tmp_path) == []


# --- every end waits -------------------------------------------------------------------------------------------------


class Stops(RLHFCallback):
    """Ends iteration 3 in its rollout, while the checkpoint of iteration 2 is being written."""

    def __init__(self, how: str, slow: Slow) -> None:
        self.how, self.slow = how, slow

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if module.control.iteration == 2:  # the save of iteration 1 was waited for; the next one begins now
            self.slow.may.clear()
            self.slow.began.clear()

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        if module.control.iteration != 3:
            return
        assert self.slow.began.wait(PATIENCE)
        assert not (Path(trainer.checkpoint_callback.dirpath) / files(2)[0]).exists()
        threading.Timer(0.3, self.slow.may.set).start()
        if self.how == "error":
            raise ZeroDivisionError("broken")
        if self.how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), {"term": signal.SIGTERM, "usr1": signal.SIGUSR1}[self.how])
        threading.Event().wait(PATIENCE)


@pytest.mark.parametrize(
    ("how", "error"), [("error", ZeroDivisionError), ("exit", SystemExit), ("term", Interrupted), ("usr1", Interrupted)]
)
def test_every_end_waits_for_the_file(tmp_path: Path, how: str, error: type[BaseException]) -> None:
    slow = Slow()
    slow.may.set()
    with pytest.raises(error), Signals():
        run(tmp_path, Stops(how, slow), plugins=[slow])
    assert names(tmp_path) == files(1, 2), "and no temporary file"
    assert is_verified(tmp_path / files(2)[0])


def test_a_failed_write_ends_the_run_at_the_next_opportunity(tmp_path: Path) -> None:
    """Before the next update, with the error of a save that training waits for."""
    whole, _ = run(tmp_path / "whole", iterations=4)
    limit, written = disk_full_after(20_000), []

    def fill(trainer: Any, module: Any) -> None:
        limit.__enter__()

    class Notes(RLHFCallback):
        def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
            written.append(stats.iteration)

    def wait(trainer: Any, module: Any) -> None:
        writer = trainer.checkpoint_callback._saving._writer
        assert writer._future.exception(PATIENCE) is not None

    scene = [At("on_train_batch_end", 3, fill), At("on_rollout_start", 4, wait), Notes()]
    try:
        with pytest.raises(CheckpointError, match=r"000003\.ckpt was not written: .*File too large.*GiB free there"):
            run(tmp_path / "a", *scene, iterations=4)
    finally:
        limit.__exit__(None, None, None)
    assert names(tmp_path / "a") == files(1, 2) and max(written) == 3
    resumed, _ = run(tmp_path / "a", iterations=4, resume=latest_valid(tmp_path / "a"))
    assert same(weights(resumed), weights(whole)) and same(moments(resumed), moments(whole))


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"000001\.ckpt was not written: .*Not a directory"):
        run(tmp_path / "file" / "checkpoints")


def killed_while_writing(rank: int, folder: Path) -> None:
    """The process dies in the thread that writes iteration 2, with half of the file on disk."""
    save = torch.save

    def dies(content: Any, file: Any) -> None:
        save(content, KilledHalfWay(file, 50_000) if content["iteration"] == 2 else file)

    torch.save = dies  # type: ignore[assignment]
    run(folder)


def test_kill_in_the_middle_of_a_write_in_the_background(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole")
    alone = {"world_size": 1, "process_group": False, "ends": [-signal.SIGKILL]}
    (tmp_path / "log").mkdir()
    run_ranks(killed_while_writing, tmp_path / "a", folder=tmp_path / "log", **alone)
    assert (tmp_path / "a" / ".iteration_000002.ckpt.partial").stat().st_size >= 50_000
    assert latest_valid(tmp_path / "a") == tmp_path / "a" / files(1)[0]
    resumed, _ = run(tmp_path / "a", resume=latest_valid(tmp_path / "a"))
    assert names(tmp_path / "a") == files(1, 2, 3), "the half file is gone"
    assert same(weights(resumed), weights(whole)) and same(moments(resumed), moments(whole))


# --- where it is not possible ----------------------------------------------------------------------------------------


def test_without_room_for_a_copy_training_waits_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rlhf.checkpoint.saving.free_host_memory", lambda: 1000)
    monkeypatch.setattr(Writer, "in_background", lambda *_: pytest.fail("a copy is made"))
    with pytest.warns(UserWarning, match="written while training waits: a copy of the state needs") as heard:
        run(tmp_path)
    assert sum("while training waits" in str(warning.message) for warning in heard) == 1
    assert names(tmp_path) == files(1, 2, 3)


def test_a_module_without_a_sign_of_its_updates_is_copied_at_once(tmp_path: Path) -> None:
    """Lightning modules of others change their weights whenever they like."""
    slow = Slow()
    module = Tiny()
    module.at[2] = lambda _: slow.may.set()
    fit_tiny(
        IterationCheckpoint(tmp_path / "a", 1, keep=None, asynchronous=True), module=module, batches=3, plugins=[slow]
    )
    fit_tiny(IterationCheckpoint(tmp_path / "b", 1, keep=None, asynchronous=False), batches=3)
    for name in files(1, 2, 3):
        assert_equal(*(torch.load(tmp_path / folder / name, weights_only=True) for folder in ("a", "b")))


def test_free_memory_of_this_machine_is_known() -> None:
    free = free_host_memory()
    assert free is not None and 2**26 < free < 2**50


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_wrong_value_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint\.asynchronous = .* is not allowed: true or false"):
        IterationCheckpoint(tmp_path, asynchronous=value)
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint\.probe = 0 is not allowed"):
        IterationCheckpoint(tmp_path, probe=0)


@pytest.mark.parametrize(("limit", "free"), [(None, 2048), ("max", 2048), ("1500", 500), ("9000000", 2048)])
def test_free_memory_is_the_least_of_what_the_system_and_the_group_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, free: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n", encoding="ascii")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="ascii")
        (tmp_path / "memory.current").write_text("1000\n", encoding="ascii")
    monkeypatch.setattr("lightning_rlhf.checkpoint.writer._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("lightning_rlhf.checkpoint.writer._CGROUP", tmp_path)
    assert free_host_memory() == free
    (tmp_path / "meminfo").unlink()
    assert free_host_memory() == (int(limit) - 1000 if limit and limit != "max" else None)
