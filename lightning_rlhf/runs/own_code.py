"""Whether an exception was raised in the user's own code, and by which of its calls."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import lightning_rlhf
from lightning_rlhf.metrics.names import MetricError

CALLS_SHOWN = 5

PACKAGE = str(Path(lightning_rlhf.__file__).parent) + os.sep

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def from_own_code(error: BaseException) -> bool:
    """Whether the user's own code raised it, itself or in a library that it called, or a metric was not declared.

    Not so if the user's code called this package and the exception was raised there.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame) or _is_ours(frame)]
    return isinstance(error, MetricError) or bool(frames and _is_own(frames[-1]))


def in_words(error: BaseException) -> str:
    """The class of an exception and its text, after the key of the user's own object that raised it, if it is known.

    Whoever calls such an object sets the key as ``error.called_as``; it stays with an exception of another process.
    """
    kind = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ": ".join(filter(None, [getattr(error, "called_as", ""), kind]))


def own_calls(error: BaseException) -> str:
    """The innermost calls of the user's own code, at most :data:`CALLS_SHOWN`, as lines of a traceback."""
    frames = list(traceback.extract_tb(error.__traceback__))
    begin = next((i for i, frame in enumerate(frames) if _is_ours(frame)), 0)  # before it: the script that was started
    own = [frame for frame in frames[begin:] if _is_own(frame)]
    return "".join(traceback.StackSummary.from_list(own[-CALLS_SHOWN:]).format()).rstrip("\n")


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return os.path.abspath(frame.filename).startswith(PACKAGE)


def _is_own(frame: traceback.FrameSummary) -> bool:
    file = os.path.abspath(frame.filename)
    installed = file.startswith(LIBRARIES) or {"site-packages", "dist-packages"} & set(Path(file).parts)
    return os.path.isfile(file) and not installed and not _is_ours(frame)
