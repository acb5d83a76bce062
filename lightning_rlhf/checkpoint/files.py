"""Checkpoints on disk: their allowed content, and their integrity. A checkpoint is a file, or a folder of shards."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_rlhf.checkpoint.records import (
    MANIFEST,
    UNVERIFIED,
    VERIFIED,
    digest,
    hashed_file,
    problem_of,
    read_record,
    record_of,
    records,
    write_record,
)
from lightning_rlhf.checkpoint.verification import CHECKED
from lightning_rlhf.quiet import own_warnings_in_words

PARTIAL, SET_ASIDE = ".partial", ".set_aside"
"""Suffixes of a checkpoint being written or removed, and of a checkpoint later than the one a run was resumed from."""
STATE = "state.pt"
"""File in a folder of shards: everything that is not sharded."""

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

    A file: size and SHA-256 of its record ``*.verified.json``, or without one the zip directory at its end and the
    checksum (CRC-32) of every entry; safe to unpickle. A folder of shards: every file in its manifest exists, with its
    size and its SHA-256, and the manifest is that of the record.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    path = Path(path)
    try:
        if path.is_dir() and not (path / MANIFEST).is_file():
            raise CheckpointError(f"the folder has no {MANIFEST}")
        recorded = _compare_with_record(path)
        if path.is_dir():
            _verify_folder(path)
        else:
            read_through(path, checksums=not recorded)
    except (OSError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error


def read_through(path: Path, *, checksums: bool = True) -> None:
    """Check that a file is a zip archive safe to unpickle, and, unless its hash is known to be right, its checksums.

    Raises:
        CheckpointError: a checksum is wrong.
        Exception: it is no such archive (``OSError``, ``RuntimeError``, ``BadZipFile``, ``UnpicklingError``).
    """
    if checksums:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"the checksum of {damaged} is wrong")
    torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _compare_with_record(path: Path) -> bool:
    """Compare size and SHA-256 with those in the record; whether there is a record."""
    record = read_record(path, VERIFIED)
    if record is None:
        return False
    file = hashed_file(path)
    recorded = {key: record.get(key) for key in ("bytes", "sha256")}
    if file.stat().st_size != recorded["bytes"] or digest(file) != recorded:
        raise CheckpointError(
            f"size or checksum are not those in {record_of(path, VERIFIED).name}; if it was changed on purpose, delete "
            "that record"
        )
    return True


def _verify_folder(folder: Path) -> None:
    for name, wanted in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items():
        if digest(folder / name) != wanted:
            raise CheckpointError(f"{name} has not the size and hash that {MANIFEST} says")
    read_through(folder / STATE)


def is_sharded(path: Path) -> bool:
    """Whether this folder is one checkpoint of shards, and not a folder that contains checkpoints."""
    return (path / MANIFEST).is_file()


def latest_valid(folder: str | Path) -> Path | None:
    """The newest good checkpoint of a folder: the highest iteration, then the time of writing.

    Good is one that is whole and did not fail its verification. Warns about every newer one that is not. ``None`` if
    there is no good one, or no such folder.
    """
    found = Path(folder).glob("[!.]*.ckpt")
    with own_warnings_in_words():
        for path in sorted(found, key=lambda p: (iteration_of(p), p.stat().st_mtime), reverse=True):
            if problem := problem_of(path):
                rank_zero_warn(f"skipped: {path} failed its verification: {problem}")
                continue
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


def publish(path: Path, problem: str | None, facts: Mapping[str, Any]) -> None:
    """Rename the finished checkpoint to ``path``, sync that to disk, and write its record.

    An older one of that name is replaced; its records are removed first, so that they never speak of the new one.

    Args:
        path: where it belongs; it lies at :func:`partial_of` now.
        problem: why it failed its verification, if it did.
        facts: for the record: size, hash, iteration.
    """
    for record in records(path):
        record.unlink()
    if problem is not None:  # before the rename: it must not pass for a good one in between
        write_record(path, UNVERIFIED, problem=problem, **facts)
    _put_in_place(path)
    if problem is None:
        write_record(path, VERIFIED, **facts, checked=list(CHECKED))


def _put_in_place(path: Path) -> None:
    if path.is_dir() or (path.exists() and partial_of(path).is_dir()):
        remove(path, hidden=path.with_name(f".replaced.{path.name}{PARTIAL}"))  # a rename cannot replace a folder
    os.replace(partial_of(path), path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, hidden: Path | None = None) -> None:
    """Delete a checkpoint, then its records.

    A folder is renamed first, so that a half-deleted one is never taken for a checkpoint.
    """
    belonging = records(path)
    if not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        if not path.name.endswith(PARTIAL):
            path = path.rename(hidden or partial_of(path))
        shutil.rmtree(path)
    for record in belonging:
        record.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint, so that it is recognised as one no longer, and remove its records."""
    aside, belonging = path.with_name(path.name + SET_ASIDE), records(path)
    remove(aside)  # left by an earlier resume; a rename does not replace a folder
    path.rename(aside)
    for record in belonging:
        record.unlink(missing_ok=True)


def not_written(path: Path, cause: object) -> CheckpointError:
    """The error of a save that failed."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free / 2**30
    return CheckpointError(
        f"checkpoint {path} was not written: {cause} ({free:.2f} GiB free there). Earlier ones are untouched."
    )
