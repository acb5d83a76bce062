"""Rewards that check a response against the answer in its data row."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_rlhf.rewards.base import RewardBatch, RewardError, origin


class AnswerReward(ABC):
    """Compares each response with the answer in the column ``answer_field`` of its row.

    The answer may be text or a number (taken as it is written), or a list of such; then the best match counts.
    """

    def __init__(self, answer_field: str = "answer") -> None:
        self.answer_field = answer_field

    def __call__(self, batch: RewardBatch) -> list[float]:
        """One number per response, ``[B]``."""
        scores = []
        for response, row in zip(batch.responses, batch.rows, strict=True):
            try:
                scores.append(max(self.score(response, answer) for answer in self.answers(row)))
            except RewardError as error:
                raise RewardError(f"{type(self).__name__}, {origin(row)}: {error}") from error
        return scores

    @abstractmethod
    def score(self, response: str, answer: str) -> float:
        """The number for one response; 1 is right."""

    def answers(self, row: Mapping[str, Any]) -> list[str]:
        """The right answers of a row.

        Raises:
            RewardError: there is none.
        """
        value = row.get(self.answer_field)
        if value is None or value == []:
            columns = ", ".join(sorted(name for name in row if not name.startswith("_"))) or "none"
            raise RewardError(f"the row has no answer in {self.answer_field!r} (columns: {columns})")
        return [str(answer) for answer in value] if isinstance(value, (list, tuple)) else [str(value)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without a usable answer."""
        self.answers(row)


class ExactMatch(AnswerReward):
    """1 if the response is the answer, else 0.

    Args:
        answer_field: column of the answer.
        strip: ignore white space at both ends.
        casefold: ignore upper and lower case.
    """

    def __init__(self, answer_field: str = "answer", *, strip: bool = True, casefold: bool = False) -> None:
        super().__init__(answer_field)
        self.strip, self.casefold = strip, casefold

    def score(self, response: str, answer: str) -> float:
        return float(self._normalise(response) == self._normalise(answer))

    def _normalise(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.casefold else text


class CharacterMatch(AnswerReward):
    """Share of characters that are right at their position, 0 to 1: partial credit while exact matches are still rare.

    White space at both ends is ignored. The count is divided by the longer of response and answer, so only the exact
    answer gets 1: for the answer ``46``, ``46`` gives 1, ``47`` gives 1/2, ``467`` gives 2/3 and an empty response 0.
    """

    def score(self, response: str, answer: str) -> float:
        response, answer = response.strip(), answer.strip()
        right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
        return right / max(len(response), len(answer), 1)


MatchMode = Literal["search", "fullmatch"]


class RegexMatch(AnswerReward):
    r"""1 if the response matches a pattern, else 0; with ``group``, if that group of the match is the answer.

    Args:
        pattern: Python regular expression; ``^`` and ``$`` are the beginning and end of the whole response.
        group: name or number of the group to compare with the answer (white space at both ends ignored); ``None``
            asks for the match alone and needs no answer: a reward for the format.
        mode: ``search`` finds the pattern anywhere, and of several matches the last one counts; with ``fullmatch``
            the whole response must match.
        answer_field: column of the answer.

    Raises:
        RewardError: the pattern is not a regular expression, or has no such group.

    Example:
        >>> RegexMatch(r"####\s*(-?\d+)", group=1).score("so #### 72", "72")
        1.0
    """

    def __init__(
        self,
        pattern: str,
        *,
        group: int | str | None = None,
        mode: MatchMode = "search",
        answer_field: str = "answer",
    ) -> None:
        super().__init__(answer_field)
        if mode not in get_args(MatchMode):
            raise RewardError(f"mode = {mode!r} is not allowed: search or fullmatch")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise RewardError(f"pattern = {pattern!r} is not a regular expression: {error}") from error
        groups = {*range(self.pattern.groups + 1), *self.pattern.groupindex}
        if group is not None and group not in groups:
            raise RewardError(f"group = {group!r} is not allowed: the pattern has {sorted(map(str, groups))}")
        self.group, self.mode = group, mode

    def answers(self, row: Mapping[str, Any]) -> list[str]:
        return [""] if self.group is None else super().answers(row)

    def score(self, response: str, answer: str) -> float:
        if self.mode == "fullmatch":
            match = self.pattern.fullmatch(response)
        else:
            matches = list(self.pattern.finditer(response))
            match = matches[-1] if matches else None
        if match is None or self.group is None:
            return float(match is not None)
        return float((match.group(self.group) or "").strip() == answer.strip())


_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}.])[-+\u2212])?                   # a sign, unless it follows an operand: 5-3 is 5 and 3
    (?P<number>
        (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?        # 1,234,567.89 or 1234.5
        | (?<!\d)\.\d+                                    # .5
    )
    (?P<exponent>[eE][-+]?\d{1,3}(?!\d))?                 # 1.5e-3
    (?:/(?P<denominator>\d+)(?!\d|\.\d))?                 # 3/4
    """,
    re.VERBOSE,
)
_MOST_CHARACTERS = 1000


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; ``None`` if there is none.

    A number is: digits, plain (``1234``) or in groups of three (``1,234``), with an optional decimal part (``.5``
    alone is one too), exponent of up to three digits (``1.5e-3``), and denominator without spaces (``3/4``; a zero
    denominator makes it no number). A sign (``-``, ``+`` or the minus sign U+2212) belongs to the number if it does
    not follow a letter, digit, closing bracket or point: ``-3.5`` and ``= -3`` are negative, in ``5-3`` the last
    number is 3. Surrounding characters are ignored: ``$1,234.50.`` is 1234.5, ``12%`` is 12, ``x2`` is 2. Numbers of
    more than 1000 characters are skipped.
    """
    values = map(_value, reversed(list(_NUMBER.finditer(text))))
    return next((value for value in values if value is not None), None)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MOST_CHARACTERS:
        return None
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction(match["number"].replace(",", "") + (match["exponent"] or "")) / denominator
    return -value if match["sign"] in ("-", "\u2212") else value


class NumericMatch(AnswerReward):
    """1 if the response's last number is the answer, else 0; :func:`last_number` defines a number.

    Numbers are compared exactly, as fractions: ``0.5`` is ``1/2``, and integers of any length are told apart. They
    also match within ``max(absolute_tolerance, relative_tolerance * |answer|)``.

    Args:
        answer_field: column of the answer: a number, or a text whose last number it is.
        marker: look only after the last occurrence of this text, such as ``####`` or ``Answer:``, and take the
            first number there; a response without it gets 0. An answer with the marker is read the same way.
        absolute_tolerance: allowed difference.
        relative_tolerance: allowed difference as a share of the answer.
    """

    def __init__(
        self,
        answer_field: str = "answer",
        *,
        marker: str | None = None,
        absolute_tolerance: float = 0.0,
        relative_tolerance: float = 0.0,
    ) -> None:
        super().__init__(answer_field)
        for name, value in (("absolute_tolerance", absolute_tolerance), ("relative_tolerance", relative_tolerance)):
            if not 0 <= value < float("inf"):
                raise RewardError(f"{name} = {value!r} is not allowed: a finite number >= 0")
        self.marker = marker
        self.absolute_tolerance = Fraction(str(absolute_tolerance))
        self.relative_tolerance = Fraction(str(relative_tolerance))

    def score(self, response: str, answer: str) -> float:
        given, wanted = self._read(response), self._answer(answer)
        if given is None:
            return 0.0
        return float(abs(given - wanted) <= max(self.absolute_tolerance, self.relative_tolerance * abs(wanted)))

    def check_row(self, row: Mapping[str, Any]) -> None:
        for answer in self.answers(row):
            self._answer(answer)

    def _answer(self, answer: str) -> Fraction:
        marked = self.marker is not None and self.marker in answer
        number = self._read(answer) if marked else last_number(answer)
        if number is None:
            raise RewardError(f"there is no number in the answer {answer[:60]!r}")
        return number

    def _read(self, text: str) -> Fraction | None:
        if self.marker is None:
            return last_number(text)
        _, found, rest = text.rpartition(self.marker)
        first = _NUMBER.search(rest) if found else None
        return _value(first) if first else None


class LengthPenalty:
    """0 up to ``soft_limit`` tokens, then falling linearly to -1 at ``hard_limit`` (DAPO, Yu et al. 2025, eq. 13).

    Args:
        soft_limit: generated tokens, end token included, up to which there is no penalty.
        hard_limit: tokens from which on the penalty is -1; usually ``max_new_tokens``.
    """

    def __init__(self, soft_limit: int, hard_limit: int) -> None:
        if not 0 <= soft_limit < hard_limit:
            raise RewardError(
                f"soft_limit = {soft_limit}, hard_limit = {hard_limit} is not allowed: 0 <= soft_limit < hard_limit"
            )
        self.soft_limit, self.hard_limit = soft_limit, hard_limit

    def __call__(self, batch: RewardBatch) -> list[float]:
        """One number from -1 to 0 per response, ``[B]``."""
        excess = (len(ids) - self.soft_limit for ids in batch.response_ids)
        return [-min(1.0, max(0.0, over / (self.hard_limit - self.soft_limit))) for over in excess]
