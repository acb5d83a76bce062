"""Paths, and atomic file replacement: a killed process leaves either the old content or the new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lightning_rlhf.errors import FolderInPlaceError


def spelt_out(path: str | Path) -> Path:
    """The path without ``~`` and ``..``: one that is recorded must not lead through a folder that may go.

    One that holds ``..`` becomes absolute, its symbolic links followed, as ``..`` is the folder above a link's target.
    """
    path = Path(path).expanduser()
    return path.resolve() if ".." in path.parts else path


def as_file(path: Path) -> Path:
    """The path itself, which may not exist yet.

    Raises:
        FolderInPlaceError: a folder lies there.
    """
    if path.is_dir():
        raise FolderInPlaceError(f"{path} is a folder; allowed is a file, or nothing yet: move the folder away")
    return path


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8, line ends as written) that is renamed to ``path`` if the block ends without an error.

    Until then it lies beside ``path``, under a name with this process's id.

    Raises:
        FolderInPlaceError: a folder lies there.
    """
    as_file(path).parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace the content of a file."""
    with replaced(path) as file:
        file.write(text)


def ensure_line_end(path: Path) -> None:
    """Append a newline if a killed process left the last line unfinished, so that the next record starts a new line.

    Raises:
        FolderInPlaceError: a folder lies there.
    """
    if as_file(path).exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
