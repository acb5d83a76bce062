"""How responses end: naturally, too early or at the length limit, and what that does to their rewards.

The choices of ``module.termination`` act at two places of an iteration. Dropped responses leave the loss mask before
mixins and advantages see it (:func:`drop_early`); so they are in no statistic of rewards, groups, advantages,
importance weights or loss. Penalties and taken rewards change the reward of a sequence (:func:`reward_changes`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.experience import Experience, Finish, Rollout
from lightning_rlhf.functional.stats import require_same_shape
from lightning_rlhf.settings import TerminationSettings


def classify(rollout: Rollout, min_tokens: int) -> Rollout:
    """The rollout, in which responses that ended after fewer than ``min_tokens`` tokens are early.

    The end token is not counted; every response that ended has exactly one. A response cut at a length limit below
    ``min_tokens`` did not end, and stays truncated.
    """
    before_end = rollout.response_lengths - 1
    early = (rollout.finish != Finish.TRUNCATED) & (before_end < min_tokens)
    ended = rollout.finish.masked_fill(rollout.finish == Finish.EARLY, int(Finish.NATURAL))
    return replace(rollout, finish=ended.masked_fill(early, int(Finish.EARLY)))


def drop_early(experience: Experience, settings: TerminationSettings) -> None:
    """Take early responses out of ``loss_mask``, where ``early`` is ``drop``; their log-probabilities stay."""
    if settings.early == "drop":
        kept = experience.finish != Finish.EARLY
        experience.loss_mask = experience.require("loss_mask") & kept.unsqueeze(-1)


class RewardChanges(NamedTuple):
    """What termination does to the rewards of the sequences.

    Attributes:
        penalty: ``[B]`` float32, at most 0, added to the scores; ``None`` if no penalty is configured.
        without: ``[B]`` bool, true on rows that lose their score; ``None`` if none can.
    """

    penalty: Tensor | None = None
    without: Tensor | None = None

    def plus(self, penalty: Tensor) -> RewardChanges:
        """With a further penalty ``[B]``."""
        return self._replace(penalty=penalty if self.penalty is None else self.penalty + penalty)


def reward_changes(experience: Experience, settings: TerminationSettings) -> RewardChanges:
    """The penalties and lost scores of all rows; penalties of several kinds add up."""
    finish = experience.finish
    scores = experience.require("scores")
    penalties: list[Tensor] = []
    if settings.early == "penalty":
        penalties.append((finish == Finish.EARLY).to(scores.dtype) * settings.early_penalty)
    if settings.truncated == "penalty":
        penalties.append((finish == Finish.TRUNCATED).to(scores.dtype) * settings.truncated_penalty)
    if settings.truncated == "soft_overlong":
        limit = experience.require("max_new_tokens")
        soft = soft_overlong_penalty(experience.response_lengths, limit, settings.overlong_cache)
        penalties.append((soft * settings.overlong_factor).to(scores.dtype))
    without = finish == Finish.TRUNCATED if settings.truncated == "drop_reward" else None
    return RewardChanges(torch.stack(penalties).sum(0) if penalties else None, without)


def soft_overlong_penalty(lengths: Tensor, limit: Tensor, cache: float) -> Tensor:
    """The soft overlong penalty of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13).

    0 up to ``L_max - L_cache`` tokens, then ``(L_max - L_cache - length) / L_cache``, which is -1 at ``L_max``, and -1
    above.

    Args:
        lengths: ``[B]`` tokens of the responses, end tokens included.
        limit: ``[B]``, L_max: the length limit under which each was drawn.
        cache: L_cache: tokens, at most ``limit`` of which are used; below 1 a share of ``limit``.

    Returns:
        ``[B]`` float64 in [-1, 0].
    """
    require_same_shape(lengths=lengths, limit=limit)
    most = limit.double()
    width = most * cache if cache < 1 else most.clamp(max=cache)
    return ((most - width - lengths) / width).clamp(-1.0, 0.0)
