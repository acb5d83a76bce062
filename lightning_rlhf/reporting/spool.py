"""A queue on disk and a background thread that empties it: records arrive, possibly late, and training never waits."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_rlhf.files import as_file
from lightning_rlhf.passwords import hidden

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Longest wait between two attempts in seconds, however long the server has been down."""


def _is_object(record: dict[str, Any]) -> bool:
    """Accepts every record."""
    return True


class Spool:
    """Records in a JSON-lines file, first in first out, from several threads of one process.

    A record is in the file when :meth:`append` returns, so it survives the process (not a power cut: the file is
    not synced), unless the disk is full: then it is kept in memory, and written or sent as soon as that works.
    Records leave the file once all are delivered; after a crash some may be delivered again, so delivery must be
    idempotent. A line that is no record is passed over, and kept in a file beside.

    Args:
        path: of the file; made with its folder by the first record.
        is_record: whether a JSON object is a record that can be delivered.
    """

    def __init__(self, path: Path, is_record: Callable[[dict[str, Any]], bool] = _is_object) -> None:
        self.path, self._is_record = path, is_record
        self.broken = path.with_name(f"{path.name}.broken")
        """File of the lines that are no records."""
        self._lock = threading.Lock()
        self._start = 0
        """Bytes of delivered records that are still in the file."""
        self._checked = 0
        """Bytes whose broken lines have been announced."""
        self._in_memory: list[bytes] = []
        """Lines that the disk has not taken; in the order of records they follow those of the file."""
        self.trouble: str | None = None
        """Why the disk did not take the last record; ``None`` if it did."""
        self._to_set_aside: list[bytes] = []
        """Broken lines that are not yet in the file beside: this one is not emptied before they are."""
        if as_file(path).exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):  # the process died while it wrote the last line
                with path.open("r+b") as file:
                    file.truncate(whole)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record of plain values; NaN and infinities survive.

        Never fails for want of disk: what the disk does not take waits in memory, behind what the file holds.
        """
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._in_memory.append(line)
            self._write()

    def pending(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Up to ``limit`` of the oldest records that are not yet committed.

        Raises:
            OSError: the file cannot be read.
        """
        records: list[dict[str, Any]] = []
        broken: list[bytes] = []
        with self._lock:
            self._write()
            if self.path.exists():
                with self.path.open("rb") as file:
                    file.seek(self._start)
                    while len(records) < limit and (line := file.readline()):
                        record = self._parsed(line)
                        if record is not None:
                            records.append(record)
                        elif file.tell() > self._checked:
                            broken.append(line)
                    end = file.tell()
                self._checked = max(self._checked, end)
                if broken or self._to_set_aside:
                    self._set_aside(broken)
                if not records:
                    self._advance(end)
            return records + [json.loads(line) for line in self._in_memory[: limit - len(records)]]

    def commit(self, count: int) -> None:
        """Mark the oldest ``count`` records as delivered."""
        with self._lock:
            if self.path.exists():
                with self.path.open("rb") as file:
                    file.seek(self._start)
                    while count > 0 and (line := file.readline()):
                        count -= self._parsed(line) is not None
                    end = file.tell()
                self._advance(end)
            del self._in_memory[:count]

    @property
    def empty(self) -> bool:
        """Whether every record is delivered; false, too, if the file cannot be read."""
        try:
            return not self.pending(limit=1)
        except OSError:  # the courier, which meets the same error, reports it
            return False

    @property
    def in_memory(self) -> list[dict[str, Any]]:
        """The records that the disk has not taken, and that would end with the process."""
        with self._lock:
            self._write()
            return [json.loads(line) for line in self._in_memory]

    def _write(self) -> None:
        """Write what waits in memory, as a whole or not at all: the next record must not be joined to half a line."""
        if not self._in_memory:
            return
        before = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = self.path.stat().st_size if self.path.exists() else 0
            with self.path.open("ab") as file:
                file.writelines(self._in_memory)
        except OSError as error:
            self.trouble = in_a_line(error)
            with suppress(OSError):  # a file that was never made, or a disk that takes no change at all
                os.truncate(self.path, before)
            return
        self._in_memory.clear()
        self.trouble = None

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        """The record in a line; ``None`` if there is none: a disk that filled up, a bad block, an edited file."""
        try:
            record = json.loads(line)
        except ValueError:  # no JSON, or not UTF-8
            return None
        return record if isinstance(record, dict) and self._is_record(record) else None

    def _set_aside(self, found: list[bytes]) -> None:
        """Copy broken lines to the file beside, unless an earlier start has done so; say where the new ones are."""
        self._to_set_aside += found
        where = str(self.broken)
        try:
            known = self.broken.read_bytes().splitlines(keepends=True) if self.broken.exists() else []
            with self.broken.open("ab") as file:
                file.writelines(line for line in self._to_set_aside if line not in known)
            self._to_set_aside = []
        except OSError as failure:
            where = f"that file, as {self.broken} cannot be written ({in_a_line(failure)})"
        if found:
            numbers = _line_numbers(self.path, found)
            log.warning("%s: %s cannot be read: kept in %s; everything else is sent", self.path, numbers, where)

    def _advance(self, end: int) -> None:
        """Everything before ``end`` is done with; if that is the whole file, the file is emptied."""
        self._start = end
        if end == self.path.stat().st_size and end and not self._to_set_aside:
            os.truncate(self.path, 0)
            self._start = self._checked = 0


def _line_numbers(path: Path, wanted: list[bytes]) -> str:
    """``line 3`` or ``lines 3, 7``: where these lines are in a file."""
    with path.open("rb") as file:
        found = [str(number) for number, line in enumerate(file, 1) if line in wanted]
    return f"line{'s' if len(found) > 1 else ''} {', '.join(found)}"


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
        self._failing = self._disk_failing = False
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

    @property
    def in_memory(self) -> list[dict[str, Any]]:
        """The records that are neither delivered nor on disk: they would be lost if the process ended now."""
        return [record for spool in self._routes for record in spool.in_memory]

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
            self._announce_disk()
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
            kept = ", ".join("memory" if spool.trouble else str(spool.path) for spool in self._routes)
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

    def _announce_disk(self) -> None:
        """Say once that a disk takes no records, and once that it does again."""
        troubled = next((spool for spool in self._routes if spool.trouble), None)
        if troubled is not None and not self._disk_failing:
            log.warning(
                "%s cannot be written (%s). Training goes on; what is logged waits in memory and is written, or sent "
                "to %s, as soon as that works.",
                troubled.path.parent,
                troubled.trouble,
                self._destination,
            )
        elif troubled is None and self._disk_failing:
            log.warning("what is logged can be written to disk again; nothing was lost.")
        self._disk_failing = troubled is not None
