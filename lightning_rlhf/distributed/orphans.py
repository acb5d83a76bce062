"""Processes of a run end with the one that started them, however that ends: nobody watches or stops them any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_POLL_SECONDS = 0.25


@contextmanager
def ends_with_parent(parent: int | None = None) -> Iterator[None]:
    """Context in which this process ends, with exit code 1, as soon as its parent is gone.

    A killed parent cannot tell its children anything, but the operating system gives them another parent.

    Args:
        parent: number of the process that started this one; ``None``: of the one that is its parent now.
    """
    parent = os.getppid() if parent is None else parent
    over = threading.Event()
    threading.Thread(target=_watch, args=(parent, over), name="parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(parent: int, over: threading.Event) -> None:
    while os.getppid() == parent:
        if over.wait(_POLL_SECONDS):
            return
    rank = os.environ.get("RANK", "0")
    with suppress(OSError):  # the terminal may be gone, too
        os.write(2, f"process {rank}: process {parent}, which started it, is gone: it ends, too\n".encode())
    os._exit(1)  # the main thread may wait for another process for ever
