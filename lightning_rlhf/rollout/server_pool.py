"""Spreads requests over several servers: by load, resent if a server dies, never to a server with old weights."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from lightning_rlhf.rollout.server_client import Server, ServerFailed, ServerMismatch

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Action = Callable[[Server], None]


class ServersGone(RuntimeError):
    """No server was left and none returned in time, or one request failed at every try."""


@dataclass(eq=False)
class Member:
    """A server of the pool."""

    server: Server
    ready: bool = False
    """Whether it may be sent requests: it holds the current weights."""
    error: ServerFailed | None = None
    """Why it is not ready."""
    lives: int = 0
    """How often it was dropped; a request remembers this number of the time when it was sent."""
    probe: Future[None] | None = None


@dataclass(frozen=True)
class Row:
    """One requested response."""

    index: int
    prompt: int
    """Rows of one prompt go to one server where possible: its prefix cache has the prompt already."""
    tokens: int
    """Prompt and longest response: the row's largest cost."""


class ServerPool:
    """The servers and their state. Only one thread at a time may use it.

    Args:
        servers: at least one.
        per_server: requests that a server is given at a time, by all processes together.
        retries: how often to check for a server when none is ready, and how often to send one row again.
        retry_seconds: between two checks of a dropped server; doubled each time while none is ready.
    """

    def __init__(self, servers: Sequence[Server], *, per_server: int, retries: int, retry_seconds: float) -> None:
        self.members = [Member(server) for server in servers]
        self.per_server, self.retries, self.retry_seconds = per_server, retries, retry_seconds
        self.at_a_time, self._order = per_server, self.members
        self._threads: ThreadPoolExecutor | None = None

    def share(self, rank: int, world: int) -> None:
        """Share the servers among several processes; to be called before any is used.

        Each process sends a server its part of ``per_server``, and starts with a different server.
        """
        self.at_a_time = self.per_server // world + (rank < self.per_server % world)
        first = rank % len(self.members)
        self._order = self.members[first:] + self.members[:first]

    @property
    def ready(self) -> list[Member]:
        """The servers that may be sent requests."""
        return [member for member in self._order if member.ready]

    def status(self) -> list[tuple[dict[str, Any], ServerFailed | None]]:
        """Of each server: the facts it reports, and why it is not ready."""
        return [(m.server.facts, None if m.ready else m.error or ServerFailed("not asked yet")) for m in self.members]

    def adopt(self, status: Sequence[tuple[dict[str, Any], ServerFailed | None]]) -> None:
        """Take over the :meth:`status` of another process; no server may have requests."""
        for member, (facts, error) in zip(self.members, status, strict=True):
            member.server.facts, member.ready, member.error = facts, error is None, error

    def bring_up(self, action: Action) -> None:
        """Run ``action``, which makes a server ready, for all at once; servers where it fails are dropped."""
        self.finish_probes(wait=True)
        jobs = [(member, self.submit(action, member.server)) for member in self.members]
        for member, job in jobs:
            self._conclude(member, job)

    def require(self, action: Action) -> None:
        """Return when a server is ready; until then check with growing pauses.

        Raises:
            ServersGone: after ``retries`` checks; at once if a server was started with unusable settings.
        """
        self.finish_probes(wait=True)
        for attempt in range(self.retries + 1):
            if self.ready:
                return
            if attempt:
                pause = self.retry_seconds * 2 ** (attempt - 1)
                log.warning("no rollout server is ready; next look in %.3g s (%d of %d)", pause, attempt, self.retries)
                time.sleep(pause)
            self.bring_up(action)
            if not self.ready and any(isinstance(member.error, ServerMismatch) for member in self.members):
                break
        if not self.ready:
            raise ServersGone(f"no rollout server is left. {self.causes()}")

    def causes(self) -> str:
        """Every server that is not ready, and why."""
        return "; ".join(f"{m.server.url}: {m.error or 'not asked yet'}" for m in self.members if not m.ready)

    def run(self, rows: Sequence[Row], draw: Callable[[Server, Row], Result], action: Action) -> list[Result]:
        """The results of all rows, one each, in the order of the rows.

        Args:
            rows: numbered from 0.
            draw: asks a server for one row; called from several threads.
            action: makes a dropped server ready that has returned.

        Raises:
            ServersGone: see :meth:`require`; or a row failed ``retries + 1`` times.
            Exception: whatever else ``draw`` raises.
        """
        return _Run(self, rows, draw, action).finish()

    def close(self) -> None:
        """End all requests and threads; the pool can be used again."""
        for member in self.members:
            member.server.disconnect()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    # --- used by the pool and its runs -------------------------------------------------------------------------------

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a job in a thread of the pool, of which there is one for each request and probe that may be running."""
        if self._threads is None:
            threads = (self.at_a_time + 1) * len(self.members)
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rollout-server")
        return self._threads.submit(job, *arguments)

    def drop(self, member: Member, error: ServerFailed) -> None:
        """Send a server no more requests and abort its running ones."""
        log.warning("rollout server %s is dropped: %s", member.server.url, error)
        member.ready, member.error = False, error
        member.lives += 1
        member.server.disconnect()

    def probe(self, action: Action, wake: Callable[[], None]) -> None:
        """Start to check whether dropped servers are back; ``wake`` is called when one check has ended."""
        self.finish_probes()
        for member in self.members:
            if not member.ready and member.probe is None:
                member.probe = self.submit(action, member.server)
                member.probe.add_done_callback(lambda _: wake())

    def finish_probes(self, *, wait: bool = False) -> None:
        """Apply the results of the probes that have ended."""
        for member in self.members:
            if member.probe is not None and (wait or member.probe.done()):
                job, member.probe = member.probe, None
                self._conclude(member, job)

    def _conclude(self, member: Member, job: Future[None]) -> None:
        """Mark the server ready, or drop it with the reason; logged once, not at every check."""
        try:
            job.result()
        except ServerFailed as error:
            if member.ready or member.error is None:
                self.drop(member, error)
            member.error = error
            return
        if member.error is not None:
            log.warning("rollout server %s is back", member.server.url)
        member.ready, member.error = True, None


class _Run(Generic[Result]):
    """One batch. All decisions are taken in the calling thread; the other threads only wait for servers."""

    def __init__(
        self, pool: ServerPool, rows: Sequence[Row], draw: Callable[[Server, Row], Result], action: Action
    ) -> None:
        self.pool, self.draw, self.action = pool, draw, action
        self.rows = len(rows)
        self.pending = deque(rows)
        self.results: dict[int, Result] = {}
        self.failures: Counter[int] = Counter()
        self.home: dict[int, Member] = {}
        self.requests: Counter[Member] = Counter()
        self.tokens: Counter[Member] = Counter()
        # Row, its server, ``lives`` of that server when the row was sent, and outcome; ``None``: a probe has ended.
        self.events: SimpleQueue[tuple[Row, Member, int, Future[Result]] | None] = SimpleQueue()

    def finish(self) -> list[Result]:
        next_probe = time.monotonic()
        try:
            while len(self.results) < self.rows:
                if not self.pool.ready and not self.requests.total():
                    self.pool.require(self.action)
                if time.monotonic() >= next_probe:
                    self.pool.probe(self.action, lambda: self.events.put(None))
                    next_probe = time.monotonic() + self.pool.retry_seconds
                self._assign()
                self._await_event(next_probe - time.monotonic())
        finally:
            for member in self.requests:
                if self.requests[member]:
                    member.server.disconnect()
        return [self.results[index] for index in range(self.rows)]

    def _assign(self) -> None:
        """Send rows to servers: to the one that has the prompt already, else to the one with the least pending."""
        while self.pending:
            free = [member for member in self.pool.ready if self.requests[member] < self.pool.at_a_time]
            if not free:
                return
            row = self.pending.popleft()
            member = self.home.get(row.prompt)
            if member not in free:
                member = self.home[row.prompt] = min(free, key=lambda m: self.tokens[m])
            self._send(row, member)

    def _send(self, row: Row, member: Member) -> None:
        self.requests[member] += 1
        self.tokens[member] += row.tokens
        life = member.lives
        job = self.pool.submit(self.draw, member.server, row)
        job.add_done_callback(lambda done: self.events.put((row, member, life, done)))

    def _await_event(self, seconds: float) -> None:
        """Wait for one row or probe, at most ``seconds``, and handle it."""
        try:
            event = self.events.get(timeout=max(0.0, seconds))
        except Empty:
            return
        if event is None:
            self.pool.finish_probes()
            return
        row, member, life, job = event
        self.requests[member] -= 1
        self.tokens[member] -= row.tokens
        try:
            self.results[row.index] = job.result()
        except ServerFailed as error:
            if member.ready and member.lives == life:
                self.pool.drop(member, error)
            self.failures[row.index] += 1
            if self.failures[row.index] > self.pool.retries:
                raise ServersGone(
                    f"one response was asked for {self.failures[row.index]} times and never came; last: {error}. "
                    f"{self.pool.causes()}"
                ) from error
            self.pending.appendleft(row)
