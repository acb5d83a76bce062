"""The callback in Ray's controller process; imports nothing of a training, as that process only watches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.train import UserCallback


class Refused(ValueError):
    """The configuration of a worker cannot work, at no other start either."""


class NotAgain(RuntimeError):
    """The training failed with an error that would come again at the next start: one in the user's own code."""


class Watch(UserCallback):
    """Prints why workers failed, and ends the run at once if another start would fail, too.

    Args:
        max_failures: restarts that Ray was told to make; -1: without limit.
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures, self.failures = max_failures, 0

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Called once for each failure, before Ray decides whether to start again.

        Raises:
            Refused, NotAgain: a worker raised it. Ray does not restart after an error raised here.
        """
        self.failures += 1
        for rank, error in sorted(worker_exceptions.items()):
            if isinstance(error, Refused):
                raise error
            if isinstance(error, NotAgain):
                raise NotAgain(*failures({rank: error}))
        if 0 <= self.max_failures < self.failures:
            return  # the command prints it
        limit = f" of {self.max_failures}" if self.max_failures >= 0 else ""
        end = f"all workers start again from the newest whole checkpoint (restart {self.failures}{limit})"
        print("\n".join([*failures(worker_exceptions), end]), flush=True)


def failures(workers: Mapping[int, Exception]) -> list[str]:
    """A line for each worker that failed. Errors of the training are RuntimeErrors, all others come from Ray."""
    lines = []
    for rank, error in sorted(workers.items()):
        lost = type(error).__module__.startswith("ray.")
        said = "was lost: its process was killed, or its machine is gone" if lost else f"failed: {error}"
        lines.append(f"worker {rank} {said}")
    return lines
