"""Errors for invalid input; they need no heavy import, so they are reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One invalid setting: its key, the given value, and what is allowed."""

    key: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        words = {None: "null", True: "true", False: "false"}  # as in YAML
        known = self.value is None or isinstance(self.value, bool)
        shown = words[self.value] if known else repr(self.value)
        return f"{self.key} = {shown if len(shown) <= 80 else shown[:77] + '...'}\n    {self.allowed}"


class SettingError(ValueError):
    """An invalid setting; the message names the key, the value and what is allowed."""

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key} = {value!r} is not allowed: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    @property
    def problem(self) -> Problem:
        """This error as one entry of a list of problems."""
        return Problem(self.key, self.value, self.allowed)


class InputError(ValueError):
    """Invalid user input; the message alone says how to correct it."""


class FolderInPlaceError(InputError, IsADirectoryError):
    """A folder lies where a file is read or written; an OSError, too, for code that goes on without the file."""


class ConfigError(InputError):
    """An invalid configuration, with all its problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class RunEnded(Exception):
    """A run has ended early; the message is shown to the user without a traceback."""
