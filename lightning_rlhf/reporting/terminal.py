"""A run's lines in the terminal and in ``train.log`` of its folder, from rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rlhf.files import as_file

FILE = "train.log"

_file = logging.getLogger("lightning_rlhf.reporting.file")
_file.propagate = False  # the line is in the terminal already
_file.setLevel(logging.INFO)


def say(text: str) -> None:
    """Print, and write into ``train.log`` while :func:`run_log` is open."""
    print(text, flush=True)
    note(text)


def note(text: str) -> None:
    """Write into ``train.log`` only."""
    if _file.handlers:
        _file.info(text)


@contextmanager
def run_log(folder: str, *, first: bool) -> Iterator[None]:
    """Write the lines of :func:`say`, :func:`note` and Python's logging into ``train.log`` of a run's folder.

    Hydra opens such a file in the process that it starts; its handler is used if it writes to the same file. Otherwise
    (processes of a multi-process run, Ray, a folder of another name) a handler is added.

    Args:
        folder: of the run.
        first: whether this is rank 0; other processes write nothing.

    Raises:
        FolderInPlaceError: a folder has the name of the file.
    """
    if not first:
        yield
        return
    path, root = as_file(Path(folder).absolute() / FILE), logging.getLogger()
    there = [h for h in root.handlers if isinstance(h, logging.FileHandler) and Path(h.baseFilename) == path]
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = there[0] if there else logging.FileHandler(path, encoding="utf-8")
    if not there:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))  # as Hydra's file
        handler.setLevel(logging.INFO)
        root.addHandler(handler)
    _file.addHandler(handler)
    try:
        yield
    finally:
        _file.removeHandler(handler)
        if not there:
            root.removeHandler(handler)
            handler.close()
