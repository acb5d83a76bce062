"""The files by which a supervised training tells its supervisor what it does, in ``supervise/`` of the run's folder.

Imported by both processes, so it needs no heavy import.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.files import write_whole

FOLDER = "supervise"
"""Folder in that of the run."""
VARIABLE = "LIGHTNING_RLHF_SUPERVISED"
"""Environment variable with that folder, for the processes of a supervised training; absent without a supervisor."""

BEAT, END, CONFIG, LAST, ATTEMPT, STATE = (
    f"{name}.json" for name in ("beat", "end", "config", "last", "attempt", "state")
)
"""The newest sign of life; the error that ended the training; its configuration; metrics and decisions of its last
iterations; what the supervisor says about this attempt; what the supervisor remembers."""

STACKS = "stacks_{pid}.txt"
"""Where the process of this number writes the stacks of its threads when it gets SIGUSR2."""


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        iteration: in progress, counted from 1; 0 before the first.
        stage: what the training is about to do.
        training: whether iterations have begun; before, models are loaded and warmed up.
        time: seconds since 1970.
        pid: the process.
        count: of this process's beats, so that two are never equal.
    """

    iteration: int
    stage: str
    training: bool
    time: float
    pid: int
    count: int

    @classmethod
    def read(cls, folder: Path) -> Beat | None:
        """The newest; ``None`` before the first."""
        found = read(folder / BEAT)
        return None if found is None else cls(**found)

    def write(self, folder: Path) -> None:
        """Replace the one before."""
        write_whole(folder / BEAT, json.dumps(asdict(self)))


def supervised() -> Path | None:
    """The folder for these files, in a process of a supervised training; ``None`` elsewhere."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def read(path: Path) -> dict[str, Any] | None:
    """The content of one of the files; ``None`` if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace the content of one of the files; numbers that JSON has no word for become texts."""
    write_whole(path, json.dumps(plain(content), ensure_ascii=False, indent=1, default=str) + "\n")


def plain(value: Any) -> Any:
    """The value with NaN and infinities as texts."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
