"""What a user is told when something given cannot work; costs no import, so that it is said at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work: where, what was given, and what is allowed."""

    key: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        words = {None: "null", True: "true", False: "false"}  # as they are written in a configuration
        known = self.value is None or isinstance(self.value, bool)
        shown = words[self.value] if known else repr(self.value)
        return f"{self.key} = {shown if len(shown) <= 80 else shown[:77] + '...'}\n    {self.allowed}"


class SettingError(ValueError):
    """A setting that cannot be honoured: names the key, the value and what is allowed."""

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key} = {value!r} is not allowed: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    @property
    def problem(self) -> Problem:
        """The same, as one of several things that are said together."""
        return Problem(self.key, self.value, self.allowed)


class InputError(ValueError):
    """Something the user gave cannot work; the message is all that is needed to mend it."""


class ConfigError(InputError):
    """A configuration that is refused, with all its problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class RunEnded(Exception):
    """A run had to end for a reason outside of it; the message is all there is to say."""
