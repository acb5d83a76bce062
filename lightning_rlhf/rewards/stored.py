"""Scores that were given before, such as those of people, looked up for the answers they were given to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_rlhf.bounds import is_number
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.faults import Faults
from lightning_rlhf.rewards.base import RewardBatch, RewardError, columns, origin

Pair = tuple[str, str]


class StoredScores:
    """Looks up the score of a prompt and a response; NaN for a pair without one, which was not measured.

    Prompts are compared as the data has them (before any chat template), responses with and without special tokens;
    spaces around a response do not count. The score of a pair with several is their mean.

    It is a gold score of ``callbacks.overoptimisation_stop`` and no term of a reward, which needs a number for every
    response.

    Args:
        rows: a source of rows, such as :class:`lightning_rlhf.data.JSONLSource`.
        prompt_field, response_field, score_field: columns. A prompt is a text, or a list of chat messages as the data
            has it.

    Raises:
        RewardError: no row, or rows without the columns or without a finite score; names them.
    """

    leaves_gaps = True
    """Some responses have no score: NaN is an answer."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        prompt_field: str = "prompt",
        response_field: str = "response",
        score_field: str = "score",
    ) -> None:
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
            raise RewardError(
                f"rows = {rows!r:.80} is not allowed: a source of rows, such as "
                "{_target_: lightning_rlhf.data.JSONLSource, path: scores.jsonl}"
            )
        given, faults = defaultdict[Pair, list[float]](list), Faults()
        for number, row in enumerate(rows, start=1):
            where = origin(row) if "_source" in row else f"row {number}"
            wrong = list(_wrong(row, prompt_field, response_field, score_field))
            if wrong:
                faults.add(f"{where}: {'; '.join(wrong)}")
            else:
                given[prompt_key(row[prompt_field]), row[response_field].strip()].append(float(row[score_field]))
        if faults:
            raise RewardError(str(faults))
        if not given:
            raise RewardError("rows: there is none, so no answer has a score")
        self.scores = {pair: math.fsum(values) / len(values) for pair, values in given.items()}

    def __call__(self, batch: RewardBatch) -> list[float]:
        """The stored scores, ``[B]``."""
        return [next(self._found(batch, i), math.nan) for i in range(len(batch))]

    def _found(self, batch: RewardBatch, i: int) -> Iterator[float]:
        pairs = ((batch.keys[i], text.strip()) for text in (batch.responses[i], batch.plain_responses[i]))
        return (self.scores[pair] for pair in pairs if pair in self.scores)


def _wrong(row: Mapping[str, Any], prompt: str, response: str, score: str) -> Iterator[str]:
    """What a row lacks."""
    missing = [name for name in (prompt, response, score) if name not in row]
    if missing:
        yield f"no column {', '.join(map(repr, missing))} (columns of the row: {columns(row)})"
        return
    if not isinstance(row[prompt], (str, list)):
        yield f"{prompt} = {row[prompt]!r:.60} is neither a text nor a list of messages"
    if not isinstance(row[response], str):
        yield f"{response} = {row[response]!r:.60} is no text"
    if not is_number(row[score]):
        yield f"{score} = {row[score]!r:.60} is not a finite number"
