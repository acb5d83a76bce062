"""Which checkpoint a retry begins from, and the marks beside those from which a training has crashed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from lightning_rlhf.files import write_whole

_NAME = re.compile(r"iteration_(\d+)\.ckpt")
_PART = 1 << 20


def sidecar(checkpoint: Path, kind: str) -> Path:
    """The file beside a checkpoint that says something about it: ``suspect`` or ``verified``."""
    return checkpoint.with_name(f"{checkpoint.stem}.{kind}.json")


def has(checkpoint: Path, kind: str) -> bool:
    """Whether such a file is beside it and of this checkpoint, not of one of the same name that was set aside."""
    try:
        return sidecar(checkpoint, kind).stat().st_mtime >= checkpoint.stat().st_mtime
    except FileNotFoundError:
        return False


def iteration_of(checkpoint: Path) -> int:
    """The iteration in its name, -1 without one."""
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


def whole(checkpoint: Path) -> bool:
    """Whether its checksums are right; the training that begins from it looks closer (this needs no torch).

    Raises:
        OSError: it cannot be read, by a fault of the disk or for want of a permission: that says nothing about it.
    """
    try:
        if checkpoint.is_dir():
            listed = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
            return all(_sha256(checkpoint / name) == entry["sha256"] for name, entry in listed.items())
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile):
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def newest(folder: Path, *, back: bool = False) -> Path | None:
    """The checkpoint to go on from; ``None`` if there is no whole one.

    The newest verified one; where none is verified, the newest that is whole.

    Args:
        folder: of the checkpoints.
        back: leave out those marked as suspect, unless all are; then it is the oldest.

    Raises:
        OSError: one cannot be read, and none of the others is whole.
    """
    found = [path for path in folder.glob("[!.]*.ckpt") if iteration_of(path) >= 0]
    found.sort(key=iteration_of, reverse=True)
    if back:
        suspect = [path for path in reversed(found) if has(path, "suspect")]
        found = [path for path in found if path not in suspect] + suspect
    unreadable = None
    for path in sorted(found, key=lambda path: not has(path, "verified")):  # keeps their order otherwise
        try:
            if whole(path):
                return path
        except OSError as error:
            unreadable = error
    if unreadable is not None:
        raise unreadable
    return None


def set_aside(folder: Path) -> None:
    """Rename all checkpoints, none of which is whole: a training that begins again refuses a folder that holds some."""
    for path in [each for each in folder.glob("[!.]*.ckpt") if iteration_of(each) >= 0]:
        for kind in ("verified", "unverified", "suspect"):
            sidecar(path, kind).unlink(missing_ok=True)
        aside = path.with_name(f"{path.name}.set_aside")
        if aside.is_dir():  # a rename does not replace a folder
            shutil.rmtree(aside)
        path.rename(aside)


def mark_suspect(checkpoint: Path, crash: dict[str, Any]) -> None:
    """Add a crash to the mark beside the checkpoint that it began from."""
    mark = sidecar(checkpoint, "suspect")
    try:
        crashes = json.loads(mark.read_text(encoding="utf-8"))["crashes"] if has(checkpoint, "suspect") else []
    except (FileNotFoundError, ValueError, KeyError):
        crashes = []
    write_whole(mark, json.dumps({"crashes": [*crashes, crash]}, ensure_ascii=False, indent=1) + "\n")
