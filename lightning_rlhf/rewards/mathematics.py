"""Mathematical equality as a reward; expressions are parsed and compared in a process that can be killed."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from lightning_rlhf.rewards import math_worker
from lightning_rlhf.rewards.base import RewardError
from lightning_rlhf.rewards.verifiable import AnswerReward

log = logging.getLogger(__name__)

START_LIMIT = 300.0  # seconds for a new process to import the library; only an overloaded machine needs so long


class MathExpression(AnswerReward):
    r"""1 if the response's expression equals the answer mathematically, else 0 (library math-verify).

    LaTeX (``\boxed{}`` first) and plain expressions are found, parsed and compared: ``1/2``, ``0.5`` and
    ``\frac{1}{2}`` are equal. What the library cannot read or decide gives 0 and is counted in :attr:`counts`:
    ``unparsed_responses``, ``unparsed_answers``, ``timeouts``, ``errors``. All but the first are logged as warnings, at
    the 1st, 2nd, 4th, 8th ... time.

    A separate process, kept between calls, does the work and is killed if an expression such as ``9^{9^{9}}`` does not
    finish; so the time limit holds in every thread and for every computation.

    Args:
        answer_field: column of the answer: an expression, with or without dollar signs.
        timeout: whole seconds that reading and comparing one response may take.

    Raises:
        ImportError: the package ``math-verify`` (extra ``math``) is not installed.
    """

    def __init__(self, answer_field: str = "answer", *, timeout: int = 3) -> None:
        super().__init__(answer_field)
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathExpression needs math-verify: pip install 'lightning-rlhf[math]'")
        if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 1:
            raise RewardError(f"timeout = {timeout!r} is not allowed: whole seconds >= 1")
        self.timeout = timeout
        self.counts: Counter[str] = Counter()
        """How often something could not be read or decided, by kind."""
        self._worker = Worker(timeout)

    def score(self, response: str, answer: str) -> float:
        try:
            value, notes = self._worker.ask(response, answer)
        except TimeoutError:
            value, notes = 0.0, [("timeouts", "")]
        except EOFError as error:
            value, notes = 0.0, [("errors", str(error))]
        for kind, trace in notes:
            self._count(kind, answer if kind == "unparsed_answers" else response, trace)
        return value

    def _count(self, kind: str, text: str, trace: str) -> None:
        self.counts[kind] += 1
        count = self.counts[kind]
        if kind != "unparsed_responses" and count & (count - 1) == 0:
            more = f"\n{trace.rstrip()}" if trace else ""
            log.warning("MathExpression: %s: %d so far; the last for %r%s", kind, count, text[:80], more)


class Worker:
    """A process that compares expressions, started at the first request, and again after it was killed.

    Threads take turns. A process forked from this one, or given a pickled copy of this object, starts its own worker.

    Args:
        limit: seconds that one request may take.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._locks: dict[int, threading.Lock] = {}
        self._running: _Running | None = None

    def __reduce__(self) -> tuple[type[Worker], tuple[float]]:
        return Worker, (self.limit,)

    def ask(self, response: str, answer: str) -> tuple[float, list[math_worker.Note]]:
        """The result of :class:`~lightning_rlhf.rewards.math_worker.Judge`.

        Raises:
            TimeoutError: the request took too long, and the process was killed.
            EOFError: the process died of this request.
            RuntimeError: the process cannot be started.
        """
        # A lock that another thread held at the moment of a fork would stay locked in the new process.
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            for attempt in (1, 2):  # a signal to all processes of the job may have killed it since the last request
                running = self._own()
                try:
                    running.connection.send((response, answer))
                    if running.connection.poll(self.limit):
                        result: tuple[float, list[math_worker.Note]] = running.connection.recv()
                        return result
                except (OSError, EOFError):
                    self.close()
                    if attempt == 2:
                        raise EOFError("the process that compares expressions died of it") from None
                else:
                    self.close()
                    raise TimeoutError
            raise AssertionError  # not reached

    def close(self) -> None:
        """Kill the process; the next request starts another one."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _own(self) -> _Running:
        if self._running is None or self._running.owner != os.getpid():
            self._running = _Running(self.limit)
        return self._running


class _Running:
    """One process and the connection to it; both end with this object, or with the interpreter."""

    def __init__(self, limit: float) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, math_worker.__file__, str(fd), str(limit)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, self.process, self.connection, self.owner)
        try:
            ready = self.connection.poll(START_LIMIT) and self.connection.recv()
        except (OSError, EOFError):
            ready = False
        if not ready:
            self.end()
            raise RuntimeError("the process that compares expressions could not be started; its own message is above")


def _end(process: subprocess.Popen[Any], connection: Connection, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # a forked copy of this object must not kill the process
        process.kill()
        process.wait()
