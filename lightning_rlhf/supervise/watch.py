"""When a training hangs: no sign of life for too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_rlhf.supervise import files
from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.settings import Settings


class Watch:
    """Compares the time since the newest beat with the limits.

    Args:
        settings: ``hang_after``, ``hang_factor``, ``start_within``.
        clock: seconds from any start; not the time of day, which may be set.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._began = self._since = clock()
        self.beat: Beat | None = None
        self._touched = 0.0
        self._longest = 0.0
        self._training = False

    def look(self, folder: Path) -> None:
        """Read the newest beat from this folder."""
        with suppress(FileNotFoundError):
            self.see(Beat.read(folder), (folder / files.BEAT).stat().st_mtime)

    def see(self, beat: Beat | None, touched: float = 0.0) -> None:
        """Take the newest beat and the time of its file; both may be the same as before."""
        if beat is None or (beat, touched) == (self.beat, self._touched):
            return
        now, self._touched = self._clock(), touched
        if self._training:
            self._longest = max(self._longest, now - self._since)
        self.beat, self._since = beat, now
        self._training = self._training or beat.training

    @property
    def overdue(self) -> str:
        """Why the training hangs, in words; empty if it does not."""
        now, settings = self._clock(), self._settings
        if not self._training:
            limit = settings.start_within
            if limit is None or now - self._began < limit:
                return ""
            return f"no iteration has begun within {limit:.0f} s"
        if settings.hang_after is None or self.beat is None:
            return ""
        limit = max(settings.hang_after, settings.hang_factor * self._longest)
        if now - self._since < limit:
            return ""
        where = f"{self.beat.stage!r} of iteration {self.beat.iteration}"
        return f"no sign of life for {now - self._since:.0f} s since {where} began or went on"
