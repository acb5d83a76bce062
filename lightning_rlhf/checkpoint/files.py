"""Checkpoints on disk: their allowed content, and their integrity. A checkpoint is a file, or a folder of shards."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, ListConfig, OmegaConf

PARTIAL, SET_ASIDE = ".partial", ".set_aside"
"""Suffixes of a checkpoint being written or removed, and of a checkpoint later than the one a run was resumed from."""
MANIFEST, STATE = "manifest.json", "state.pt"
"""Files in a folder of shards: sizes and hashes of all its files; everything that is not sharded."""

_LEAVES = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or is incomplete or damaged."""


# --- content ---------------------------------------------------------------------------------------------------------


def plain(value: Any, where: str = "checkpoint") -> Any:
    """The value in plain containers, which ``torch.load(weights_only=True)`` accepts.

    OmegaConf containers are resolved; tensors are not copied. ``where`` is the value's name in an error.

    Raises:
        CheckpointError: names the key that holds anything but tensors, numbers, strings and containers of them.
    """
    kind = type(value)
    if kind in _LEAVES or kind in _SCALARS:
        return value
    if kind in (DictConfig, ListConfig):
        return plain(OmegaConf.to_container(value, resolve=True), where)
    if kind in (dict, OrderedDict):
        # Lightning stores the class of OmegaConf hyper-parameters beside them; once they are plain it is not needed.
        entries = ((k, v) for k, v in value.items() if k != LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE)
        return with_items(value, ((plain(k, f"a key of {where}"), plain(v, f"{where}[{k!r}]")) for k, v in entries))
    if kind in (list, tuple, set):
        return kind(plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, strings and plain "
        "containers only, so that it can be loaded with weights_only=True"
    )


def with_items(mapping: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of the same kind with other items."""
    copy = type(mapping)(items)
    if isinstance(copy, OrderedDict):
        vars(copy).update(vars(mapping))  # a state_dict carries the versions of its modules as an attribute
    return copy


# --- integrity -------------------------------------------------------------------------------------------------------


def verify(path: str | Path) -> None:
    """Read a whole checkpoint and check it.

    A file: zip directory at its end, checksum (CRC-32) of every record, safe to unpickle. A folder of shards: every
    file in its manifest exists, with its size and its SHA-256.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    path = Path(path)
    try:
        _verify_folder(path) if path.is_dir() else _verify_file(path)
    except (OSError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error


def _verify_file(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"the checksum of {damaged} is wrong")
    torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _verify_folder(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"the folder has no {MANIFEST}")
    for name, wanted in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items():
        if digest(folder / name) != wanted:
            raise CheckpointError(f"{name} has not the size and hash that {MANIFEST} says")
    _verify_file(folder / STATE)


def digest(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, as a manifest holds them."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            sha256.update(part)
    return {"bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


def is_sharded(path: Path) -> bool:
    """Whether this folder is one checkpoint of shards, and not a folder that contains checkpoints."""
    return (path / MANIFEST).is_file()


def latest_valid(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a folder: the highest iteration, then the time of writing.

    Warns about every newer incomplete one. ``None`` if there is no complete one, or no such folder.
    """
    found = Path(folder).glob("[!.]*.ckpt")
    for path in sorted(found, key=lambda p: (iteration_of(p), p.stat().st_mtime), reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            rank_zero_warn(f"skipped: {error}")
        else:
            return path
    return None


def iteration_of(path: Path) -> int:
    """The iteration in a checkpoint's name, -1 if there is none."""
    match = re.fullmatch(r"iteration_(\d+)\.ckpt", path.name)
    return int(match.group(1)) if match else -1


# --- renaming and removing -------------------------------------------------------------------------------------------


def partial_of(path: Path) -> Path:
    """Path of a checkpoint while it is written or removed; it is not recognised as a checkpoint there."""
    return path.with_name(f".{path.name}{PARTIAL}")


def put_in_place(path: Path) -> None:
    """Rename the finished checkpoint to ``path`` and sync that to disk. An older one of that name is replaced."""
    if path.is_dir() or (path.exists() and partial_of(path).is_dir()):
        remove(path, hidden=path.with_name(f".replaced.{path.name}{PARTIAL}"))  # a rename cannot replace a folder
    os.replace(partial_of(path), path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, hidden: Path | None = None) -> None:
    """Delete a checkpoint; a folder is renamed first, so that a half-deleted one is never taken for a checkpoint."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.endswith(PARTIAL):
        path = path.rename(hidden or partial_of(path))
    shutil.rmtree(path)


def not_written(path: Path, cause: object) -> CheckpointError:
    """The error of a save that failed."""
    free = shutil.disk_usage(path.parent).free / 2**30
    return CheckpointError(
        f"checkpoint {path} was not written: {cause} ({free:.2f} GiB free there). Earlier ones are untouched."
    )
