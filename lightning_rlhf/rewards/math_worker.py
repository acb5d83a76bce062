"""Parses and compares mathematical expressions in a separate process, which can be killed if nothing else stops it.

:mod:`lightning_rlhf.rewards.mathematics` runs this file as a script; it imports nothing of the package, which would
import PyTorch. Arguments: the file descriptor of an inherited connection, and the seconds that one request may take.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

Note = tuple[str, str]
"""A kind of failure, and its traceback if there is one."""

GRACE = 5.0
"""Seconds after which the process ends by itself if its parent, which should have killed it, is gone."""


class Judge:
    """Compares responses with answers; each answer is parsed once.

    Args:
        library: the package ``math_verify``.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self._answers: dict[str, tuple[list[Any], list[Note]]] = {}

    def __call__(self, response: str, answer: str) -> tuple[float, list[Note]]:
        """1 if both are equal, else 0; and notes on what could not be parsed or decided."""
        if answer not in self._answers:
            notes: list[Note] = []
            # Without dollar signs math-verify would look for a plain number and take the 2 of \{1, 2\}.
            marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
            self._answers[answer] = self._parse(marked, notes) or self._parse(answer, notes) or [], notes
        wanted, notes = self._answers[answer][0], list(self._answers[answer][1])
        if not wanted:
            return 0.0, [*notes, ("unparsed_answers", "")]
        given = self._parse(response, notes)
        if not given:
            return 0.0, [*notes, *([("unparsed_responses", "")] if given is not None else [])]
        try:
            equal = self.library.verify(wanted, given, timeout_seconds=None, raise_on_error=True)
        except Exception:
            return 0.0, [*notes, ("errors", traceback.format_exc())]
        return float(bool(equal)), notes

    def _parse(self, text: str, notes: list[Note]) -> list[Any] | None:
        """The expressions in a text; ``None`` if parsing failed, which is added to ``notes``."""
        try:
            found: list[Any] = self.library.parse(text, parsing_timeout=None, raise_on_error=True)
        except Exception:  # the parser and SymPy raise all kinds on odd input
            notes.append(("errors", traceback.format_exc()))
            return None
        return found


def main(connection: Connection, limit: float) -> None:
    """Answer requests until the other side is gone."""
    # A terminal sends the first two, and SLURM the third, to all processes; the run handles them.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off
    import math_verify

    judge = Judge(math_verify)
    connection.send("ready")
    while True:
        try:
            response, answer = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit + GRACE)
        result = judge(response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(result)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules must not be importable at top level
    main(Connection(int(sys.argv[1])), float(sys.argv[2]))
