"""A checkpoint in a folder of shards: verified, removed and set aside, never unpickled unsafely."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_rlhf.assembly import find_checkpoint
from lightning_rlhf.checkpoint import AtomicCheckpointIO, CheckpointError, IterationCheckpoint, latest_valid, verify
from lightning_rlhf.checkpoint.files import remove
from lightning_rlhf.checkpoint.retention import superseded
from lightning_rlhf.checkpoint.shards import read_checkpoint, write_folder
from lightning_rlhf.models.sharding import placed


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def content(mesh: DeviceMesh, value: float = 1.0) -> dict[str, Any]:
    moments = {"step": torch.tensor(3.0), "exp_avg": distribute_tensor(torch.full((4, 2), 7.0), mesh, [Shard(0)])}
    return {
        "state_dict": {"a.w": distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)]), "sigma": torch.ones(2)},
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"params": [0], "betas": (0.9, 0.95)}]}],
        "nothing": None,
    }


@pytest.fixture
def two(mesh: DeviceMesh, tmp_path: Path) -> list[Path]:
    """Checkpoints of iterations 1 and 2."""
    paths = [tmp_path / "checkpoints" / f"iteration_{n:06d}.ckpt" for n in (1, 2)]
    for n, path in enumerate(paths, 1):
        write_folder(content(mesh, float(n)), path)
    return paths


def test_what_was_written_is_read_whole_or_sharded(mesh: DeviceMesh, two: list[Path]) -> None:
    alone = read_checkpoint(two[1])
    assert torch.equal(alone["state_dict"]["a.w"], torch.full((4, 2), 2.0))
    assert alone["optimizer_states"][0]["state"][0]["exp_avg"][3, 1] == 7
    assert alone["optimizer_states"][0]["param_groups"] == [{"params": [0], "betas": (0.9, 0.95)}]
    assert alone["nothing"] is None
    sharded = read_checkpoint(two[1], mesh)["state_dict"]["a.w"]
    assert isinstance(sharded, DTensor) and torch.equal(sharded.full_tensor(), torch.full((4, 2), 2.0))
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(two[0])["state_dict"]["a.w"], torch.ones(4, 2))


def damage(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (damage, "__0_0.distcp has not the size and hash"),
    "cut short": (lambda folder: os.truncate(folder / ".metadata", 10), ".metadata has not the size and hash"),
    "a file is missing": (lambda folder: (folder / "state.pt").unlink(), "No such file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "the folder has no manifest.json"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 30), "is not a whole checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_skipped(two: list[Path], name: str) -> None:
    damaging, words = DAMAGES[name]
    damaging(two[1])
    with pytest.raises(CheckpointError, match=words):
        verify(two[1])
    with pytest.warns(UserWarning, match="skipped: "):
        assert latest_valid(two[0].parent) == two[0]


def test_a_folder_is_a_checkpoint_and_not_a_folder_of_checkpoints(two: list[Path]) -> None:
    assert find_checkpoint(str(two[0])) == two[0]
    assert find_checkpoint(str(two[0].parent)) == two[1]
    assert find_checkpoint(str(two[0].parent.parent)) == two[1]


def test_metadata_may_only_hold_what_belongs_there(two: list[Path]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    (two[0] / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"posix.system, which does not belong"):
        read_checkpoint(two[0])


def test_manifest_names_every_file(two: list[Path]) -> None:
    names = json.loads((two[0] / "manifest.json").read_text(encoding="utf-8"))["files"].keys()
    assert names == {file.name for file in two[0].iterdir()} - {"manifest.json"}


def test_folders_are_removed_and_set_aside(two: list[Path], tmp_path: Path) -> None:
    callback = IterationCheckpoint(two[0].parent, keep=1)
    leftover = two[0].with_name(".iteration_000009.ckpt.partial")
    leftover.mkdir()
    (leftover / "half").touch()
    for old in superseded(callback.checkpoints, keep=1):
        remove(old)
    assert callback.checkpoints == [two[1]]
    aside = two[1].with_name(two[1].name + ".set_aside")
    aside.mkdir()  # of an earlier resume
    (aside / "old").touch()
    callback._set_aside_later()
    assert callback.checkpoints == []
    assert (aside / "manifest.json").is_file() and not (aside / "old").exists()
    assert latest_valid(two[0].parent) is None


def test_placed_takes_this_ranks_slice_and_keeps_the_dtype(mesh: DeviceMesh) -> None:
    like = distribute_tensor(torch.zeros(4, 2, dtype=torch.bfloat16), mesh, [Shard(0)])
    whole = torch.arange(8.0).view(4, 2)
    found = placed(whole, like)
    assert isinstance(found, DTensor) and found.dtype == torch.float32
    assert torch.equal(found.full_tensor(), whole)
    assert placed(whole, torch.zeros(4, 2)) is whole
