"""Faults of data rows: all of them are found before the run ends, the first ones are shown."""

from __future__ import annotations

SHOWN = 10
"""Faults that an error message lists."""


class Faults:
    """What is wrong with rows, in their order; only the first :data:`SHOWN` texts are kept, the others are counted."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, fault: object) -> None:
        """One row's fault: its place of origin, a colon and the reason."""
        self.count += 1
        if self.count <= SHOWN:
            self._shown.append(str(fault))

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        """The fault alone if there is one, else one line for each."""
        if self.count == 1:
            return self._shown[0]
        more = [f"and {self.count - SHOWN} more"] if self.count > SHOWN else []
        return "\n  ".join([f"{self.count} rows cannot be used:", *self._shown, *more])


def excerpt(text: str, at: int, before: int = 40, after: int = 20) -> str:
    """The text around a position as a literal, with dots where it is cut; it begins at a word if one is near.

    Args:
        text: any.
        at: the position, counted from 0.
        before: characters before it at most.
        after: characters from it on at most.
    """
    start, end = max(0, at - before), at + after
    if start and not text[start - 1].isspace():
        words = [i + 1 for i in range(start, start + before // 2) if text[i].isspace()]
        start = words[0] if words else start
    return f"{'...' if start else ''}{text[start:end]!r}{'...' if end < len(text) else ''}"
