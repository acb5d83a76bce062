"""A checkpoint in a folder: each rank writes the shards it holds, with torch.distributed.checkpoint.

``state.pt`` holds everything that is not sharded, and the name of each sharded tensor in its place; ``*.distcp`` and
``.metadata`` are PyTorch's; ``manifest.json`` is written last and has size and hash of all of them. Any number of
processes can read such a folder, also a single one without ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_sharded

from lightning_rlhf.checkpoint.files import (
    STATE,
    CheckpointError,
    not_written,
    partial_of,
    plain,
    publish,
    remove,
    with_items,
)
from lightning_rlhf.checkpoint.records import MANIFEST, digest
from lightning_rlhf.checkpoint.verification import first_not_finite

_SHARDED = "sharded tensor"
"""Key of the mapping that replaces a sharded tensor in ``state.pt``."""

_Result = TypeVar("_Result")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_folder(checkpoint: dict[str, Any], path: Path, buffers: Collection[str] = ()) -> None:
    """Write a checkpoint whose sharded tensors are DTensors; called on every rank. Complete or absent, like a file.

    It gets a record, like a file: each rank checks its own slices, before they are written.

    Args:
        checkpoint: its content.
        path: of the folder.
        buffers: names in the ``state_dict`` that are no weights and may be infinite.

    Raises:
        CheckpointError: on every rank, if any of them could not write its part; nothing is left behind, and an older
            checkpoint of that name is untouched.
    """
    rank, partial = dist.get_rank(), partial_of(path)
    shards: dict[str, Tensor] = {}
    try:
        state = _together(lambda: plain(_take_out(checkpoint, "", shards)))[rank]
        _together(lambda: _prepare(partial) if rank == 0 else None)
        _together(lambda: dcp.save(shards, storage_writer=dcp.FileSystemWriter(partial, sync_files=True)))
        hashes = _together(lambda: {file.name: digest(file) for file in partial.glob(f"__{rank}_*.distcp")})
        problem = next(filter(None, _together(lambda: first_not_finite(checkpoint, buffers))), None)
        _together(lambda: _finish(state, hashes, path, problem, shards) if rank == 0 else None)
    except CheckpointError as error:
        if rank == 0:
            remove(partial)
        raise not_written(path, error) from error


def _together(work: Callable[[], _Result]) -> list[_Result]:
    """Run ``work`` on every rank, and return the results of all ranks.

    Raises:
        CheckpointError: on every rank, if ``work`` fails on one.
    """
    mine: tuple[Any, str | None]
    try:
        mine = work(), None
    except CheckpointException as error:  # holds the errors of all ranks; not a subclass of Exception
        mine = None, "; ".join(str(failure) for failure, _ in error.failures.values()) or str(error)
    except (OSError, RuntimeError) as error:
        mine = None, str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}")
    return [result for result, _ in everyone]


def _take_out(value: Any, name: str, shards: dict[str, Tensor]) -> Any:
    """The value with sharded tensors replaced by their names; the tensors are added to ``shards`` under these names."""
    if isinstance(value, DTensor):
        shards[name] = value.detach()
        return {_SHARDED: name}
    if isinstance(value, dict):
        prefix = f"{name}." if name else ""
        return with_items(value, ((key, _take_out(item, f"{prefix}{key}", shards)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return type(value)(_take_out(item, f"{name}.{index}", shards) for index, item in enumerate(value))
    return value


def _prepare(partial: Path) -> None:
    remove(partial)
    partial.mkdir(parents=True)


def _other_shapes(partial: Path, shards: dict[str, Tensor]) -> str | None:
    """What differs between the sharded tensors of a folder and those in memory, in words."""
    written = shapes_of_shards(partial)
    wanted = {name: tuple(tensor.shape) for name, tensor in shards.items()}
    differing = sorted(name for name in written.keys() | wanted.keys() if written.get(name) != wanted.get(name))
    return f"its sharded tensors are not those in memory, {differing[0]} first" if differing else None


def _finish(
    state: Any, hashes: list[dict[str, Any]], path: Path, problem: str | None, shards: dict[str, Tensor]
) -> None:
    """Rank 0: add state and manifest once all ranks' shards are on disk, then rename the folder."""
    partial = partial_of(path)
    _write(partial / STATE, lambda file: torch.save(state, file))
    files = {name: entry for part in hashes for name, entry in part.items()}
    files |= {name: digest(partial / name) for name in (".metadata", STATE)}
    _write(partial / MANIFEST, lambda file: file.write(json.dumps({"files": files}, indent=2).encode()))
    missing = sorted(files.keys() ^ ({file.name for file in partial.iterdir()} - {MANIFEST}))
    if missing:
        raise CheckpointError(f"files are missing or too many: {', '.join(missing)}")
    problem = problem or _other_shapes(partial, shards)
    publish(path, problem, digest(partial / MANIFEST) | {"iteration": state.get("iteration")})


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


# --- reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """The content of a checkpoint, file or folder.

    Args:
        path: the checkpoint.
        mesh: sharded tensors of a folder are sharded over these ranks, along the first dimension as in FSDP2; every
            rank must call this, and reads the shards it needs. ``None``: whole tensors, on the CPU.

    Raises:
        CheckpointError: the folder is damaged.
    """
    if path.is_file():
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    reader = _Reader(path)
    try:
        state = torch.load(path / STATE, map_location="cpu", mmap=True, weights_only=True)
        shards = {
            name: _empty(entry, mesh)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(shards, storage_reader=reader, no_dist=mesh is None)
    except (OSError, RuntimeError, pickle.UnpicklingError, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _put_back(state, shards)


def shapes_of_shards(path: Path, part: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of the whole sharded tensors of a folder, or of those below a top-level key by their names there.

    Reads no tensor.

    Raises:
        CheckpointError: the folder is damaged.
    """
    try:
        entries = _Reader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    prefix = f"{part}." if part else ""
    return {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _empty(entry: TensorStorageMetadata, mesh: DeviceMesh | None) -> Tensor:
    dtype = entry.properties.dtype
    if mesh is None:
        return torch.empty(entry.size, dtype=dtype)
    return empty_sharded(entry.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def _put_back(value: Any, shards: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_SHARDED}:
            return shards[value[_SHARDED]]
        return with_items(value, ((key, _put_back(item, shards)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(item, shards) for item in value)
    return value


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader; ``.metadata`` is a pickle, of which only the expected classes are loaded."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f".metadata holds {module}.{name}, which does not belong into a checkpoint")
        return super().find_class(module, name)


_ALLOWED = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Classes allowed in a ``.metadata``, by module, as found with torch 2.13; and the dtypes."""
