"""Damage to checkpoints on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 300.0


def folder() -> Path:
    """Where the supervised training of this process keeps its checkpoints."""
    own = Path(os.environ["LIGHTNING_RLHF_SUPERVISED"]).parent / "checkpoints"
    return own if own.is_dir() else Path("disk")


def newest(place: Path, iteration: int, how: str) -> None:
    """Damage the checkpoint of an iteration, once it is in place with its record."""
    path = place / f"iteration_{iteration:06d}.ckpt"
    record = path.with_suffix(".verified.json")
    until = time.monotonic() + PATIENCE
    while not (path.exists() and record.exists()):
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is not written")
        time.sleep(0.01)
    WAYS[how](path, record)


def _cut(path: Path, share: float) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def _flip(path: Path, share: float) -> None:
    """Flip one bit."""
    with path.open("rb+") as file:
        place = int(share * path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def _all(path: Path) -> None:
    for each in path.parent.glob("*.ckpt"):
        _cut(each, 0.5)


def _both(path: Path, record: Path) -> None:
    path.unlink()
    record.unlink()


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "cut to a half": lambda path, record: _cut(path, 0.5),
    "without its last byte": lambda path, record: os.truncate(path, path.stat().st_size - 1),
    "with a bit flipped at 30 %": lambda path, record: _flip(path, 0.3),
    "with a bit flipped at 60 %": lambda path, record: _flip(path, 0.6),
    "of size 0": lambda path, record: _cut(path, 0.0),
    "missing": lambda path, record: path.unlink(),
    "missing with its record": _both,
    "without its record": lambda path, record: record.unlink(),
    "with a record of size 0": lambda path, record: _cut(record, 0.0),
    "cut, and all others": lambda path, record: _all(path),
}
"""Name -> what is done to a checkpoint and its record."""
