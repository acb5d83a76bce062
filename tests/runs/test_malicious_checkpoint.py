"""A checkpoint that would run code when unpickled is refused by every verb that reads one, and runs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf import cli
from lightning_rlhf.checkpoint import CheckpointError
from lightning_rlhf.checkpoint.shards import STATE, read_checkpoint
from tests.checkpoint.test_shards import mesh, two  # noqa: F401


class Evil:
    """Makes the folder ``executed`` in the current one when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "hydra.run.dir=resumed", "resume="],
        ["eval", "checkpoint="],
        ["export", "output=exported", "checkpoint="],
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_nothing_is_executed(
    words: list[str],
    folder: bool,
    two: list[Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = two[0] if folder else tmp_path / "iteration_000001.ckpt"
    torch.save({"state_dict": {}, "iteration": 1, "evil": Evil()}, path / STATE if folder else path)
    assert cli.main([*words[:-1], words[-1] + str(path)]) == 2
    said = capsys.readouterr().err
    assert path.name in said and "Traceback" not in said
    assert not Path("executed").exists() and not Path("exported").exists()


def test_the_other_files_of_a_folder(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), two[1] / STATE)
    with pytest.raises(CheckpointError):
        read_checkpoint(two[1])
    assert not Path("executed").exists()
    torch.load(two[1] / STATE, weights_only=False)
    assert Path("executed").exists(), "the pickle does what it is meant to"
