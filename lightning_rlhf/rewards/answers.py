"""Good answers of the policy, kept to stand in for its unsafe ones."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.experience import Experience, Finish, Rollout, Safety

WINDOW = 1024
"""An answer is good from the median of so many of the latest scores on."""


class Answer(NamedTuple):
    """One answer that is kept; tensors are on the CPU."""

    prompt: Tensor
    """``[P]`` int32, without padding."""
    response: Tensor
    """``[R]`` int32, end token included."""
    score: float
    pairs: Tensor
    """``[N]`` int64, see :func:`pairs_of`."""


def pairs_of(ids: Tensor) -> Tensor:
    """``[N]`` int64, ascending: every pair of neighbouring tokens once, as one number; the first token has a pair, too.

    Args:
        ids: ``[P]`` token ids.
    """
    ids = ids.long()
    before = torch.nn.functional.pad(ids + 1, (1, 0))[:-1]
    return torch.unique(before << 32 | ids)


class AnswerCache:
    """The best-scored answer to each of the latest prompts, of this rank.

    An answer is kept if the policy wrote it, it is safe, ended by itself, and its score is at or above the median of
    the last :data:`WINDOW` scores of such answers. Of two answers to one prompt the better one stays, of equal ones the
    newer. Where there are too many, those leave that were kept longest ago.

    Args:
        size: answers at most.
        similarity: smallest similarity of a prompt whose answer may be used for another one, see :meth:`for_rows`.
    """

    def __init__(self, size: int, similarity: float) -> None:
        self.size, self.similarity = size, similarity
        self._answers: dict[str, Answer] = {}
        """By prompt key, the oldest first."""
        self._scores: deque[float] = deque(maxlen=WINDOW)

    def copy(self) -> AnswerCache:
        """What is kept now, for a draw in another thread."""
        copied = AnswerCache(self.size, self.similarity)
        copied._answers, copied._scores = dict(self._answers), self._scores.copy()
        return copied

    def remember(self, experience: Experience) -> None:
        """Keep the good answers of one iteration; all its scores count for the median before the first is compared."""
        scores = experience.require("scores").double()
        eligible = (experience.require("safety") == Safety.SAFE) & (experience.finish == Finish.NATURAL)
        rows = (eligible & scores.isfinite()).nonzero().flatten().tolist()
        if not rows:
            return
        numbers = scores.tolist()
        self._scores.extend(numbers[row] for row in rows)
        bar = statistics.median(self._scores)
        good = [row for row in rows if numbers[row] >= bar]
        prompts, responses = _tokens(experience, good)
        for row, prompt, response in zip(good, prompts, responses, strict=True):
            key = experience.prompt_key[row]
            if (earlier := self._answers.get(key)) is None or numbers[row] >= earlier.score:
                self._answers.pop(key, None)
                self._answers[key] = Answer(prompt, response, numbers[row], pairs_of(prompt))
        self._shrink()

    def for_rows(self, rows: Rollout, longest: int) -> list[Tensor | None]:
        """Tokens of the answer that may stand in each row: to the same prompt or, failing that, to the most similar.

        The similarity is that of Jaccard: of the pairs of neighbouring tokens in either prompt, the share that is in
        both. Pairs that all kept prompts have, such as those of a chat template, count as neither. Of equally similar
        prompts the one whose answer has the best score is taken, and of equal scores the newest.

        Args:
            rows: whose prompts are asked.
            longest: answers with more tokens are left out.

        Returns:
            ``[R]`` int32 for each row; ``None`` where no answer is similar enough.
        """
        fitting = {key: answer for key, answer in self._answers.items() if len(answer.response) <= longest}
        kept = _Similarity(list(fitting.values()))
        prompts, _ = _tokens(rows, range(len(rows)))
        found: dict[str, Answer | None] = {}
        for key, prompt in zip(rows.prompt_key, prompts, strict=True):
            if key not in found:
                found[key] = fitting.get(key) or kept.nearest(prompt, self.similarity)
        return [None if (answer := found[key]) is None else answer.response for key in rows.prompt_key]

    def state_dict(self) -> dict[str, Any]:
        """Answers and latest scores, as plain containers and tensors."""
        answers = list(self._answers.values())
        return {
            "keys": list(self._answers),
            "prompts": [answer.prompt for answer in answers],
            "responses": [answer.response for answer in answers],
            "scores": [answer.score for answer in answers],
            "latest_scores": list(self._scores),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; an empty one restores nothing."""
        if not state:
            return
        columns = (state["keys"], state["prompts"], state["responses"], state["scores"])
        self._answers = {key: Answer(p, r, score, pairs_of(p)) for key, p, r, score in zip(*columns, strict=True)}
        self._scores = deque(state["latest_scores"], maxlen=WINDOW)
        self._shrink()

    def _shrink(self) -> None:
        for key in list(self._answers)[: max(len(self._answers) - self.size, 0)]:
            del self._answers[key]


class _Similarity:
    """Compares a prompt with those of all answers at once."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self._shared = self._pairs = torch.zeros(0, dtype=torch.long)
        self._owner = self._pairs
        if not answers:
            return
        pairs = torch.cat([answer.pairs for answer in answers])
        owner = torch.arange(len(answers)).repeat_interleave(torch.tensor([len(answer.pairs) for answer in answers]))
        values, place, counts = pairs.unique(return_inverse=True, return_counts=True)
        telling = counts < len(answers)
        self._shared, kept = values[~telling], telling[place]
        self._pairs, self._owner = pairs[kept], owner[kept]

    def nearest(self, prompt: Tensor, least: float) -> Answer | None:
        """The answer to the most similar prompt, if that is similar enough."""
        asked = pairs_of(prompt)
        asked = asked[~torch.isin(asked, self._shared)]
        number = len(self.answers)
        both = torch.bincount(self._owner[torch.isin(self._pairs, asked)], minlength=number)
        either = torch.bincount(self._owner, minlength=number) + len(asked) - both
        similar = (both.double() / either.clamp(min=1)).tolist()
        ranked = [(similar[i], answer.score, i) for i, answer in enumerate(self.answers) if similar[i] >= least]
        return self.answers[max(ranked)[2]] if ranked else None


def _tokens(rows: Rollout, chosen: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Prompt and response of the chosen rows without padding: int32 tensors with memory of their own, on the CPU."""
    index = torch.tensor(list(chosen), dtype=torch.long, device=rows.prompt_ids.device)
    found: list[list[Tensor]] = []
    for name in ("prompt", "response"):
        ids, mask = (getattr(rows, f"{name}_{what}")[index].cpu() for what in ("ids", "mask"))
        found.append([row[kept].to(torch.int32) for row, kept in zip(ids, mask, strict=True)])
    return found[0], found[1]
