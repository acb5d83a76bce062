"""Writes one checkpoint at a time, here or in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class Writer(Generic[_Result]):
    """At most one piece of work, done in this thread or in another; its result or error is taken afterwards.

    The thread is no daemon: a process that ends waits for the file. It is killed with the process, of course; then the
    checkpoint before is the newest one.
    """

    def __init__(self) -> None:
        self._future: Future[_Result] | None = None
        self._copied: threading.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose result was not taken yet."""
        return self._future is not None

    @property
    def done(self) -> bool:
        """Whether there is a result, or an error, to be taken at once."""
        return self._future is not None and self._future.done()

    @property
    def failed(self) -> bool:
        """Whether there is an error to be taken."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def now(self, work: Callable[[], _Result]) -> None:
        """Do the work in this thread."""
        assert self._future is None
        self._future = Future()
        _into(self._future, work)

    def in_background(self, copy: Callable[[], Any], work: Callable[[Any], _Result]) -> None:
        """Copy the state and do the work in another thread.

        Args:
            copy: copies the state to host memory; :meth:`wait_for_copy` waits for it.
            work: gets the copy.
        """
        assert self._future is None
        self._future, self._copied = Future(), threading.Event()
        arguments = (self._future, self._copied, copy, work)
        threading.Thread(target=_copied_into, args=arguments, name="checkpoint", daemon=False).start()

    def wait_for_copy(self) -> None:
        """Wait until the state was copied, so that it may change."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

    def take(self) -> _Result:
        """Wait for the work, and return its result.

        Raises:
            Exception: that of the work; there is none to be taken afterwards.
        """
        assert self._future is not None
        future = self._future
        future.exception()  # a signal raises here, and leaves the work to be taken later
        self._future = self._copied = None
        return future.result()


def _into(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised where the result is taken
        future.set_exception(error)


def _copied_into(
    future: Future[Any], copied: threading.Event, copy: Callable[[], Any], work: Callable[[Any], Any]
) -> None:
    def both() -> Any:
        try:
            content = copy()
        finally:
            copied.set()
        return work(content)

    _into(future, both)


# --- memory ----------------------------------------------------------------------------------------------------------

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_host_memory() -> int | None:
    """Bytes of host memory that this process may still take; ``None`` where the system does not say (no Linux)."""
    limits = []
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if (_CGROUP / "memory.max").exists():  # not in the root of the groups, nor in their first version
        most = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            limits.append(int(most) - int((_CGROUP / "memory.current").read_text(encoding="ascii")))
    return min(limits, default=None)
