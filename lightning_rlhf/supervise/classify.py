"""How a training has ended: the class of its end, which decides what is tried next."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLASSES: dict[str, str] = {
    "out_of_memory": "out of memory, on the device or killed by the kernel",
    "divergence": "NaN, or a callback has found the run to be broken",
    "communication": "another process or a server did not answer, or a server answered with an error",
    "hang": "no sign of life",
    "killed": "killed by SIGKILL, not by the supervisor",
    "preempted": "SIGTERM or SIGUSR1, not passed on by the supervisor",
    "configuration": "wrong configuration or other input",
    "user_code": "an error in your own code, such as a reward",
    "disk": "a file or checkpoint could not be written",
    "unknown": "any other error",
}
"""What can go wrong, in words."""
USER_CODE = "user_code"
DONE, STOPPED = "done", "stopped"
"""The class of errors in the user's own code. Two further classes of an end: the training is finished; a signal to
the supervisor, or Ctrl-C, ended it."""

_BY_EXIT = {
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
    signal.SIGINT: STOPPED,
    signal.SIGHUP: STOPPED,
    signal.SIGKILL: "killed",
}
_INVALID = 2
"""Exit code of refused input."""

_SCREEN = 12
"""Lines of a refusal that are kept."""

_BY_TEXT = (
    ("out_of_memory", r"out of memory|OutOfMemory|MemoryError|can't allocate memory|cannot allocate memory"),
    ("disk", r"no space left on device|disk quota exceeded|read-only file system|was not written: "),
    ("killed", r"ended with signal 9\b"),
    ("communication", r"NCCL|gloo|connection (?:closed|reset|refused)|socket timeout|timed out|DistNetworkError"),
    ("divergence", r"TrainingFailed|not finite|\bNaNs?\b"),
)


@dataclass(frozen=True)
class Ended:
    """What the supervisor knows about the end of one attempt.

    Attributes:
        code: exit code; minus the signal that ended the process.
        passed: the first signal that the supervisor has passed on, 0 if none.
        hang: why the supervisor has killed it, empty if it has not.
        oom_kills: processes that the kernel has killed meanwhile for want of memory.
        record: what the training has recorded about its error.
        output: the end of what it wrote to stderr.
    """

    code: int
    passed: int = 0
    hang: str = ""
    oom_kills: int = 0
    record: Mapping[str, Any] | None = field(default=None)
    output: str = ""

    @property
    def exit_code(self) -> int:
        """As a shell gives it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def error(self) -> str:
        """The error in one text: the record's message, or how the process ended."""
        if self.record:
            text = f"{self.record.get('exception')}: {self.record.get('message')}"
            return "\n".join(filter(None, [text, str(self.record.get("origin") or "")]))
        if self.hang:
            return self.hang
        if self.code < 0 or self.code > 128:
            return f"ended by {_name(self.exit_code - 128)}"
        lines = [line for line in self.output.splitlines() if line.strip()]
        if self.code == _INVALID:  # one screen, which begins with what is wrong
            return "\n".join(lines[-_SCREEN:]) or "refused input"
        return lines[-1].strip() if lines else f"exit code {self.code}"


def classify(end: Ended) -> str:
    """The class of an end: one of :data:`CLASSES`, ``done`` or ``stopped``."""
    if end.code == 0:
        return DONE
    if end.passed:
        return STOPPED
    if end.hang and not end.record:  # one that hangs after its error, waiting for others, has said why
        return "hang"
    signalled = _BY_EXIT.get(end.exit_code - 128) if end.exit_code > 128 else None  # type: ignore[call-overload]
    recorded = str(end.record.get("class")) if end.record else None
    found = recorded or signalled
    if found is None:
        found = "configuration" if end.code == _INVALID else by_text(end.output) or "unknown"
    if end.oom_kills and found in ("killed", "unknown", "communication"):
        return "out_of_memory"
    return found if found in (*CLASSES, STOPPED) else "unknown"


def by_text(text: str) -> str | None:
    """The class that a text of an error names, for want of anything better; ``None`` if it names none."""
    return next((kind for kind, pattern in _BY_TEXT if re.search(pattern, text, re.IGNORECASE)), None)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
