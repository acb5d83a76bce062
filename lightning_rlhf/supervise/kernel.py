"""What only the kernel knows or does: who descends from whom, ends with its parent, was killed for want of memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """One option of this process; elsewhere than on Linux nothing happens."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(signum: int) -> None:
    """Get this signal when the parent ends, however it ends (Linux)."""
    _prctl(_SET_PDEATHSIG, signum)


@contextmanager
def adopting() -> Iterator[None]:
    """Context in which processes whose parent has ended become children of this one, so that they can be found."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_SET_CHILD_SUBREAPER, 0)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on; empty where there is no ``/proc``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    found, wave = [], [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        found += wave
    return found


def kill_descendants(spared: set[int]) -> None:
    """SIGKILL to all descendants of this process but those spared, until none is left."""
    own = os.getpid()
    for _ in range(100):  # a process may start another one while it is being killed
        left = [pid for pid in descendants(own) if pid not in spared and not _reaped(pid)]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _reaped(pid: int) -> bool:
    """Whether a process has ended; one that this process has to wait for is waited for."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # no child of this process
        return not Path(f"/proc/{pid}").exists()


def oom_kills() -> int:
    """Processes that the kernel has killed so far for want of memory: in this control group, or on this machine."""
    for file in _memory_files():
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _memory_files() -> Iterator[Path]:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield Path(f"/sys/fs/cgroup{path}", "memory.events")
            elif "memory" in controllers.split(","):
                yield Path(f"/sys/fs/cgroup/memory{path}", "memory.oom_control")
    yield Path("/sys/fs/cgroup/memory.events")
    yield Path("/proc/vmstat")
