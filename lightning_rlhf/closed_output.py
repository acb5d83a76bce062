"""A command ends quietly when the reader of its output goes away, as ``head`` does after some lines."""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

READER_GONE = 141
"""Exit code, that of a program which SIGPIPE has ended."""

_P = ParamSpec("_P")


def quiet_without_reader(main: Callable[_P, int]) -> Callable[_P, int]:
    """Decorator of a function that returns an exit code: :data:`READER_GONE` where its output has no reader any more.

    SIGPIPE itself stays ignored, as Python has it: a connection to a server that has gone raises the same error, and
    that one is not swallowed.
    """

    @functools.wraps(main)
    def wrapped(*arguments: _P.args, **options: _P.kwargs) -> int:
        try:
            code = main(*arguments, **options)
            sys.stdout.flush()  # here, where the error can be told from others, not at the interpreter's end
            return code
        except BrokenPipeError:
            if not _reader_gone():
                raise
            # What is left in the buffer would be written, and complained about, at the interpreter's end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE

    return wrapped


def _reader_gone() -> bool:
    """Whether standard output is a pipe, or a connection, whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported whatever is asked for
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
