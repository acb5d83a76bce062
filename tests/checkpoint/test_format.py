"""Checkpoints of every release are resumed; of a later format, or without a key, they are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_rlhf import __version__, cli
from lightning_rlhf.checkpoint import CheckpointError, IterationCheckpoint, latest_valid
from lightning_rlhf.checkpoint.format import FORMAT, refuse_format
from tests.checkpoint.test_callback import files, fit, quiet  # noqa: F401

RELEASES = Path(__file__).parent / "releases"
"""A folder for each release, with the second checkpoint of a run of the tiny model, as that release has written it.

Written by ``train warmup=none logger=none model.source.{hidden_size=16,layers=1,heads=2} data.prompts_per_iteration=4
data.validation=null rollout.max_new_tokens=4 module.update.{minibatch_size=4,epochs=1} callbacks=checkpoint
callbacks.checkpoint.every_n_iterations=1 iterations=2``.
"""


@pytest.mark.parametrize("release", sorted(path.name for path in RELEASES.iterdir()))
def test_a_checkpoint_of_a_release_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RELEASES / release, tmp_path / "kept")
    source = latest_valid("kept")
    assert source is not None
    before = torch.load(source, weights_only=True)
    assert before["written_by"]["lightning_rlhf"] == release
    assert cli.main(["train", "resume=kept", "iterations=3", "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    newest = latest_valid("run/checkpoints")
    assert newest is not None
    after = torch.load(newest, weights_only=True)
    assert (before["iteration"], after["iteration"]) == (2, 3)
    steps = [saved["optimizer_states"][0]["state"][0]["step"].item() for saved in (before, after)]
    assert steps[1] == steps[0] + 1, "its optimiser goes on"
    assert before["state_dict"].keys() == after["state_dict"].keys()


def test_there_is_one_of_this_release() -> None:
    assert (RELEASES / __version__).is_dir(), "keep a checkpoint of it"


def test_the_format_is_written_and_a_later_one_is_refused(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path), batches=1)
    saved = torch.load(tmp_path / files(1)[0], weights_only=True)
    assert saved["written_by"] == {"lightning_rlhf": __version__, "format": FORMAT}
    saved["written_by"] = {"lightning_rlhf": "9.1.0", "format": FORMAT + 1}
    later = tmp_path / "later.ckpt"
    torch.save(saved, later)
    said = rf"format {FORMAT + 1}, written by lightning_rlhf 9\.1\.0; this is lightning_rlhf .*formats up to {FORMAT}"
    with pytest.raises(CheckpointError, match=said):
        fit(IterationCheckpoint(tmp_path / "b"), batches=2, resume=later)
    refuse_format({})  # an earlier one has no number
