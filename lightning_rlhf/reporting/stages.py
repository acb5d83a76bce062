"""Says of a stage of an iteration that it has been going on for long: a reward or engine that hangs says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST = 300.0
"""Seconds after which a stage is said to go on; it is said again each time that has doubled."""
LOOK = 15.0
"""Seconds between two looks at the clock."""


class StageWatch:
    """Tells, from a thread of its own, that a stage has been going on for 5, 10, 20, ... minutes.

    A stage that has ended before is given twice the longest time that it took: a slow run is no hung one.

    Args:
        tell: takes the line.
        clock: seconds from any start.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._stage, self._since, self._due = "", 0.0, FIRST
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def begin(self, stage: str) -> None:
        """A stage begins, and with it the one before has ended; an empty name: none begins."""
        with self._lock:
            now = self._clock()
            self._longest[self._stage] = max(self._longest.get(self._stage, 0.0), now - self._since)
            self._stage, self._since = stage, now
            self._due = max(FIRST, 2 * self._longest.get(stage, 0.0))

    def look(self) -> None:
        """Tell if the stage has been going on for too long."""
        with self._lock:
            stage, seconds = self._stage, self._clock() - self._since
            if not stage or seconds < self._due:
                return
            self._due = 2 * seconds
        self._tell(f"note: {stage}: going on for {seconds / 60:.0f} minutes now, and not finished")

    def start(self) -> None:
        """Begin to look."""
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._ended,), name="stage watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK):
            self.look()
