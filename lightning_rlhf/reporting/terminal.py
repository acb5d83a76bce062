"""What a run says: in the terminal and in ``train.log`` of its folder, of the first process alone."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE = "train.log"

_file = logging.getLogger("lightning_rlhf.reporting.file")
_file.propagate = False  # the terminal has it already
_file.setLevel(logging.INFO)


def say(text: str) -> None:
    """Print, and write into ``train.log`` while :func:`run_log` is open."""
    print(text, flush=True)
    note(text)


def let_go_of_closed_terminals() -> None:
    """Lead standard output and errors to nowhere where their terminal is gone: every print would be an error."""
    nowhere = os.stat(os.devnull).st_rdev
    for descriptor in (1, 2):
        with suppress(OSError):
            there = os.fstat(descriptor)
            if stat.S_ISCHR(there.st_mode) and there.st_rdev != nowhere and not os.isatty(descriptor):
                file = os.open(os.devnull, os.O_WRONLY)
                os.dup2(file, descriptor)
                os.close(file)


def note(text: str) -> None:
    """Write into ``train.log`` only."""
    if _file.handlers:
        _file.info(text)


@contextmanager
def run_log(folder: str, *, first: bool) -> Iterator[None]:
    """Keep what :func:`say`, :func:`note` and Python's logging say inside in ``train.log`` of a run's folder.

    Hydra keeps such a file of the process that it starts; the handler is taken over where it is the same file, and
    made where there is none: in the processes of a run with several, under Ray, in a folder of another name.

    Args:
        folder: of the run.
        first: whether this process speaks for all; the others write nothing.
    """
    if not first:
        yield
        return
    path, root = Path(folder).absolute() / FILE, logging.getLogger()
    there = [h for h in root.handlers if isinstance(h, logging.FileHandler) and Path(h.baseFilename) == path]
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = there[0] if there else logging.FileHandler(path, encoding="utf-8")
    if not there:
        handler.setFormatter(logging.Formatter("%(message)s"))
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
