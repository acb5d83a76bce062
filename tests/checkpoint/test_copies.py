"""Copies of verified checkpoints elsewhere: whole, as many as are kept, and never in the way of the run."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from mlflow import MlflowClient

from lightning_rlhf.checkpoint import IterationCheckpoint, latest_valid, verify
from lightning_rlhf.checkpoint import copies as module
from lightning_rlhf.checkpoint.copies import Copies
from lightning_rlhf.errors import SettingError
from lightning_rlhf.reporting import RLMLFlowLogger
from tests.checkpoint.test_callback import Tiny, files, fit, quiet  # noqa: F401
from tests.checkpoint.test_shards import content, mesh  # noqa: F401
from tests.checkpoint.test_verification import overflow


def both(*iterations: int) -> list[str]:
    """Names of files and of their records."""
    records = [name.replace(".ckpt", ".verified.json") for name in files(*iterations)]
    return sorted(files(*iterations) + records)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_kept_is_copied_whole(tmp_path: Path, scheme: str) -> None:
    target = tmp_path / "backup" / "run"
    fit(IterationCheckpoint(tmp_path / "a", every_n_iterations=4, keep=1, copy_to=f"{scheme}{target}"))
    assert sorted(os.listdir(target)) == sorted(os.listdir(tmp_path / "a")) == both(8)
    assert (target / files(8)[0]).read_bytes() == (tmp_path / "a" / files(8)[0]).read_bytes()
    assert latest_valid(target) == target / files(8)[0]


def test_a_checkpoint_that_failed_is_not_copied(tmp_path: Path) -> None:
    learner = Tiny()
    learner.at[2] = overflow
    with pytest.warns(UserWarning, match="FAILED"):
        fit(IterationCheckpoint(tmp_path / "a", 1, copy_to=str(tmp_path / "b")), module=learner, batches=3)
    assert sorted(os.listdir(tmp_path / "b")) == both(1)


class Breaks(LocalFileSystem):
    """A file system that is full, or that loses the end of what it is given."""

    protocol = "broken"
    lost = False

    def put_file(self, source: Any, target: Any, *args: Any, **options: Any) -> None:
        if not self.lost:
            raise OSError(28, "No space left on device")
        super().put_file(source, target, *args, **options)
        os.truncate(target, 100)


@pytest.mark.parametrize(("lost", "said"), [(False, "OSError: .*No space left"), (True, "OSError: 100 bytes arrived")])
def test_a_failure_is_said_and_never_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool, said: str
) -> None:
    monkeypatch.setattr(Breaks, "lost", lost)
    monkeypatch.setattr(module.fsspec.core, "url_to_fs", lambda url: (Breaks(), str(tmp_path / "b")))
    with pytest.warns(UserWarning, match=rf"iteration_000002\.ckpt was not copied to broken://b: {said}") as heard:
        fit(IterationCheckpoint(tmp_path / "a", 2, copy_to="broken://b"), batches=2)
    failures = [str(w.message) for w in heard if "was not copied" in str(w.message)]
    assert len(failures) == len(set(failures)) <= 2, "once for each failure"
    assert sorted(os.listdir(tmp_path / "a")) == both(1, 2)
    assert sorted(os.listdir(tmp_path / "b")) == [], "and no half copy"


class Waits(LocalFileSystem):
    protocol = "slow"
    may, began = threading.Event(), threading.Event()

    def put_file(self, source: Any, target: Any, *args: Any, **options: Any) -> None:
        Waits.began.set()
        assert Waits.may.wait(300)
        super().put_file(source, target, *args, **options)


def test_training_does_not_wait_and_what_is_being_copied_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations 1 to 4 are saved while the first copy hangs; of those that wait only the newest is copied."""
    monkeypatch.setattr(module.fsspec.core, "url_to_fs", lambda url: (Waits(), str(tmp_path / "b")))
    Waits.may.clear()
    seen: list[list[str]] = []
    learner = Tiny()

    def look(_: Tiny) -> None:
        assert Waits.began.wait(300)
        seen.append(sorted(name for name in os.listdir(tmp_path / "a") if name.endswith(".ckpt")))
        Waits.may.set()

    learner.at[5] = look
    fit(IterationCheckpoint(tmp_path / "a", 1, keep=1, copy_to="slow://b"), module=learner, batches=5)
    assert set(files(1)) <= set(seen[0]), "kept although keep = 1"
    assert sorted(os.listdir(tmp_path / "a")) == both(5)
    assert sorted(os.listdir(tmp_path / "b")) == both(5)


def test_the_end_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.fsspec.core, "url_to_fs", lambda url: (Waits(), str(tmp_path / "b")))
    Waits.may.clear()
    copies = Copies("slow://b")
    (tmp_path / "iteration_000001.ckpt").touch()
    copies.send(tmp_path / "iteration_000001.ckpt")
    with pytest.warns(UserWarning, match="not yet copied to slow://b: the run ends without it"):
        copies.finish(0.01)
    Waits.may.set()
    copies.finish()


def test_a_folder_of_shards_is_copied(tmp_path: Path, mesh: Any) -> None:  # noqa: F811
    from lightning_rlhf.checkpoint.shards import read_checkpoint, write_folder

    path = tmp_path / "iteration_000003.ckpt"
    write_folder(content(mesh) | {"iteration": 3}, path)
    copies = Copies(str(tmp_path / "b"))
    for _ in range(2):  # also over one of the same name
        copies.send(path)
        copies.finish()
    copied = tmp_path / "b" / path.name
    verify(copied)
    assert torch.equal(read_checkpoint(copied)["state_dict"]["a.w"], torch.ones(4, 2))
    assert sorted(os.listdir(tmp_path / "b")) == both(3)


def test_mlflow_gets_artifacts(tmp_path: Path, fresh_store: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(fresh_store.read_bytes())
    logger = RLMLFlowLogger(tmp_path / "run", store_dir=tmp_path)
    fit(IterationCheckpoint(tmp_path / "a", 2, copy_to="mlflow"), batches=2, logger=logger)
    assert logger.run_id is not None
    client = MlflowClient(logger.tracking_uri)
    artifacts = {file.path for file in client.list_artifacts(logger.run_id, "checkpoints")}
    assert {f"checkpoints/{name}" for name in both(2)} <= artifacts
    with pytest.raises(SettingError, match="copy_to = 'mlflow' is not allowed: another target, or a run with logger="):
        fit(IterationCheckpoint(tmp_path / "b", 2, copy_to="mlflow"), batches=2)


@pytest.mark.parametrize("value", ["", " ", 5, "nosuch://bucket/run"])
def test_a_wrong_target_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingError, match=r"callbacks\.checkpoint\.copy_to = .* is not allowed: a"):
        IterationCheckpoint(tmp_path, copy_to=value)
