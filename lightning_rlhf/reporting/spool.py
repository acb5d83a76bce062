"""A queue on disk and a background thread that empties it: records arrive, possibly late, and training never waits."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_rlhf.passwords import hidden

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Longest wait between two attempts in seconds, however long the server has been down."""


class Spool:
    """Records in a JSON-lines file, first in first out, from several threads of one process.

    A record is in the file when :meth:`append` returns, so it survives the process (not a power cut: the file is
    not synced). Records leave the file once all are delivered; after a crash some may be delivered
    again, so delivery must be idempotent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._start = 0
        """Bytes of delivered records that are still in the file."""
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):  # the process died while it wrote the last line
                with path.open("r+b") as file:
                    file.truncate(whole)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record of plain values; NaN and infinities survive."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(line)

    def pending(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Up to ``limit`` of the oldest records that are not yet committed."""
        records: list[dict[str, Any]] = []
        with self._lock:
            if self.path.exists():
                with self.path.open("rb") as file:
                    file.seek(self._start)
                    while len(records) < limit and (line := file.readline()):
                        records.append(json.loads(line))
        return records

    def commit(self, count: int) -> None:
        """Mark the oldest ``count`` records as delivered."""
        with self._lock, self.path.open("r+b") as file:
            file.seek(self._start)
            for _ in range(count):
                file.readline()
            self._start = file.tell()
            if not file.read(1):
                file.truncate(0)
                self._start = 0

    @property
    def empty(self) -> bool:
        """Whether every record is delivered."""
        return not self.pending(limit=1)


Deliver = Callable[[list[dict[str, Any]]], int]
"""Delivers some of the oldest records, at least one, and returns how many; raises if that was not possible."""


def in_a_line(error: Exception) -> str:
    """A server's or database's error on one line, without the SQL that SQLAlchemy appends, and without passwords."""
    said = f"{type(error).__name__}: {error}".partition("[SQL:")[0].partition("(Background on this error")[0]
    return hidden(" ".join(said.split()))[:300]


class Courier:
    """A background thread that delivers spools, and keeps trying if that fails.

    Args:
        routes: each spool and the function that delivers its records; a failing spool does not block the others.
        destination: name of the server or database in messages.
        retry_seconds: first wait after a failure; it doubles up to :data:`LONGEST_WAIT`. New records and
            :meth:`flush` try at once.
    """

    def __init__(self, routes: dict[Spool, Deliver], destination: str, retry_seconds: float) -> None:
        self._routes, self._destination, self._retry = routes, destination, retry_seconds
        self._condition = threading.Condition()
        self._requested = 0
        self._finished = 0
        self._failing = False
        self._thread: threading.Thread | None = None

    def wake(self) -> int:
        """Ask for an attempt soon; returns its number."""
        with self._condition:
            self._requested += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="metrics courier", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            return self._requested

    def flush(self, timeout: float) -> bool:
        """Try once to deliver everything now; returns whether all arrived within ``timeout`` seconds."""
        attempt = self.wake()
        with self._condition:
            self._condition.wait_for(lambda: self._finished >= attempt, timeout)
        return all(spool.empty for spool in self._routes)

    def _run(self) -> None:
        wait = self._retry
        while True:
            with self._condition:
                timeout = wait if self._failing else None
                self._condition.wait_for(lambda: self._requested > self._finished, timeout)
                attempt = self._requested
            reason = self._attempt()
            wait = min(2 * wait, LONGEST_WAIT) if self._failing else self._retry
            self._announce(reason)
            with self._condition:
                self._finished = attempt
                self._condition.notify_all()

    def _attempt(self) -> str | None:
        """Deliver all spools; returns the last reason why that failed, or ``None``."""
        reason = None
        for spool, deliver in self._routes.items():
            try:
                while records := spool.pending():
                    spool.commit(deliver(records))
            except Exception as error:  # whatever error the server raises, training goes on and the records are kept
                log.debug("delivery to %s failed", self._destination, exc_info=True)
                reason = in_a_line(error)
        return reason

    def _announce(self, reason: str | None) -> None:
        """Warn once that the server does not answer, and once that it is back."""
        if reason is not None and not self._failing:
            kept = ", ".join(str(spool.path) for spool in self._routes)
            log.warning(
                "%s does not take what is logged (%s). Training goes on; nothing is lost: it is kept in %s and sent "
                "as soon as that works.",
                self._destination,
                reason,
                kept,
            )
        elif reason is None and self._failing:
            log.warning("%s is back; everything kept meanwhile has been sent.", self._destination)
        self._failing = reason is not None
