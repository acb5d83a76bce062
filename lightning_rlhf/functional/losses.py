"""Losses of PPO and its relatives. Column ``t`` of every ``[B, R]`` tensor speaks of response token ``t``.

Masked tokens are replaced by 0 **before** ``exp`` and products, so that NaN or infinity in padding reaches neither the
value nor the gradient. Where everything is masked the loss is 0 and still connected to the graph, with gradient 0.
float32 and float64 are supported; float16 and bfloat16 are refused, except for stored importance weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from lightning_rlhf.functional.choices import Aggregation, RatioLevel
from lightning_rlhf.functional.kl import MAX_LOG_RATIO
from lightning_rlhf.functional.stats import require_float32, require_same_shape, select_valid


@dataclass(frozen=True)
class LossScale:
    """How token losses become one number, the same in every term of a loss.

    ============================  ==================================================================================
    ``token-mean``                sum / tokens
    ``seq-mean-token-sum``        sum / sequences
    ``seq-mean-token-mean``       sum over rows of the row's mean / sequences
    ``seq-mean-token-sum-norm``   sum / (sequences x horizon) (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)
    ============================  ==================================================================================

    With the counts of the **whole minibatch over all ranks**, the results of micro-batches and ranks add up to that of
    the minibatch. Without them, each call counts what is valid in its own mask.

    Attributes:
        mode: as above.
        tokens: valid tokens. A number > 0; 0 only where nothing is valid.
        sequences: sequences with a valid token, likewise.
        horizon: length limit of a response, a constant > 0; ``None``: R, which depends on how the batch was padded.

    Raises:
        ValueError: an unknown mode.
    """

    mode: Aggregation = "token-mean"
    tokens: float | Tensor | None = None
    sequences: float | Tensor | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Aggregation):
            raise ValueError(
                f"loss aggregation {self.mode!r} is not allowed: one of {', '.join(get_args(Aggregation))}"
            )


TOKEN_MEAN = LossScale()
"""The mean over the valid tokens of the mask that is given."""


class PolicyLoss(NamedTuple):
    """Policy loss, and tensors for metrics; everything but the loss is detached.

    Attributes:
        loss: scalar.
        ratio: ``[B, R]`` policy ratio before clipping; 1 at masked tokens.
        clipped: ``[B, R]`` bool, valid tokens where the clip is **active**: the clipped term is the larger loss and the
            gradient is 0. A ratio outside the band whose clip does not bind is not counted.
        clipped_lower: ``[B, R]`` bool, valid tokens where the dual clip is active.
        accepted: ``[B, R]`` bool, the tokens in the loss if rejection depends on the current policy; ``None``: all
            valid tokens. Other loss terms of the micro-batch and its metrics use the same tokens.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    accepted: Tensor | None = None


class ValueLoss(NamedTuple):
    """Value loss (scalar), and ``[B, R]`` bool: valid tokens where the clip is active, whose gradient is 0."""

    loss: Tensor
    clipped: Tensor


def aggregate(loss: Tensor, mask: Tensor, scale: LossScale = TOKEN_MEAN) -> Tensor:
    """Aggregate token losses over valid tokens; rows without any count in no denominator.

    Args:
        loss: ``[B, R]``.
        mask: ``[B, R]``, true on valid tokens.
        scale: the aggregation and its denominators.

    Raises:
        ValueError: shapes that differ, half precision, or an invalid denominator.
    """
    require_same_shape(loss=loss, mask=mask)
    require_float32(loss=loss)
    mask = mask.bool()
    valid = select_valid(loss, mask)
    if scale.mode == "token-mean":
        return valid.sum() / _denominator("tokens", scale.tokens, mask, mask.sum())
    length = mask.sum(-1)
    rows = valid.sum(-1)
    if scale.mode == "seq-mean-token-mean":
        rows = rows / length.clamp(min=1)
    total = rows.sum() / _denominator("sequences", scale.sequences, mask, (length > 0).sum())
    if scale.mode == "seq-mean-token-sum-norm":
        total = total / _denominator("horizon", scale.horizon, mask, mask.new_tensor(loss.shape[1], dtype=torch.long))
    return total


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    ratio_level: RatioLevel = "token",
    scale: LossScale = TOKEN_MEAN,
) -> PolicyLoss:
    """Clipped PPO loss (Schulman et al. 2017, arXiv 1707.06347): ``max(-A r, -A clip(r, 1 - low, 1 + high))``.

    Args:
        logprobs: ``[B, R]`` under the current policy; the only argument with a gradient.
        old_logprobs: ``[B, R]`` under the policy before the update.
        advantages: ``[B, R]``.
        mask: ``[B, R]``, true on valid tokens.
        clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
        dual_clip: for negative advantages the loss is at most ``-A dual_clip`` (Ye et al. 2020, arXiv 1912.09729).
        weights: ``[B, R]`` importance weights, constants that multiply each token's clipped loss.
        ratio_level: ``token``, or ``sequence``: exp of the row's mean log-ratio for each of its tokens (GSPO, Zheng et
            al. 2025, arXiv 2507.18071), whose gradient reaches token ``t`` as ``ratio * grad log-prob_t``.
        scale: how token losses become one number.

    Raises:
        ValueError: shapes that differ, half precision, or a setting out of range.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    require_float32(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    _check_clip(clip_low, clip_high, dual_clip)
    log_ratio = _log_ratio(logprobs, old_logprobs.detach(), mask, ratio_level)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gain = select_valid(advantages.detach(), mask)
    plain, bounded = -gain * ratio, -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped_lower = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None:
        limit = -gain * dual_clip
        clipped_lower = (gain < 0) & (loss > limit)
        loss = torch.where(clipped_lower, limit, loss)
    if weights is not None:
        require_same_shape(weights=weights, mask=mask)
        loss = loss * select_valid(weights.detach(), mask)
    scalar = aggregate(loss, mask, scale)
    return PolicyLoss(scalar, ratio.detach(), (bounded > plain).detach(), clipped_lower)


def reinforce_policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    scale: LossScale = TOKEN_MEAN,
) -> PolicyLoss:
    """REINFORCE (Williams 1992), off-policy by importance weights: ``-A w log p``, without a clip.

    Args:
        logprobs: ``[B, R]`` under the current policy; the only argument with a gradient.
        rollout_logprobs: ``[B, R]`` under the policy that sampled; only for the reported ratio.
        advantages: ``[B, R]``.
        mask: ``[B, R]``, true on valid tokens.
        weights: ``[B, R]`` importance weights, constants; absent means 1.
        scale: how token losses become one number.

    Raises:
        ValueError: shapes that differ, or half precision.
    """
    require_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask)
    require_float32(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    gain = select_valid(advantages.detach(), mask)
    if weights is not None:
        require_same_shape(weights=weights, mask=mask)
        gain = gain * select_valid(weights.detach(), mask)
    # Tokens with gain 0 are left out: 0 times a log-probability of -inf would be NaN.
    loss = -gain * select_valid(logprobs, mask.bool() & (gain != 0))
    scalar = aggregate(loss, mask, scale)
    log_ratio = select_valid(logprobs.detach() - rollout_logprobs.detach(), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    never = torch.zeros_like(mask, dtype=torch.bool)
    return PolicyLoss(scalar, ratio, never, never)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    scale: LossScale = TOKEN_MEAN,
) -> ValueLoss:
    """Half the aggregate of ``max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``.

    Args:
        values: ``[B, R]`` of the current critic; the only argument with a gradient.
        old_values: ``[B, R]`` of the critic before the update; read only where ``clip`` is given.
        returns: ``[B, R]``, the targets.
        mask: ``[B, R]``, true on valid tokens.
        clip: c; ``None`` for the plain squared error.
        scale: how token losses become one number.

    Raises:
        ValueError: shapes that differ, half precision, or ``clip`` is not above 0.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    require_float32(values=values, old_values=old_values, returns=returns)
    values, target = select_valid(values, mask), select_valid(returns.detach(), mask)
    loss = (values - target).square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"value clip {clip} is not allowed: a number > 0, or None")
        old = select_valid(old_values.detach(), mask)
        bounded = (torch.clamp(values, old - clip, old + clip) - target).square()
        clipped = (bounded > loss).detach()
        loss = torch.maximum(loss, bounded)
    scalar = 0.5 * aggregate(loss, mask, scale)
    return ValueLoss(scalar, clipped)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """``[B, R]`` log of the policy ratio at the given level, not yet clamped; 0 at masked tokens."""
    log_ratio = select_valid(logprobs - old_logprobs, mask)
    if level == "token":
        return log_ratio
    if level == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
        # The row's mean as value, each token's own gradient; own - own.detach() is exactly 0, but NaN for infinities.
        own = select_valid(log_ratio, log_ratio.isfinite())
        return select_valid(mean.detach() + (own - own.detach()), mask)
    raise ValueError(f"ratio level {level!r} is not allowed: one of {', '.join(get_args(RatioLevel))}")


def _check_clip(low: float, high: float, dual: float | None) -> None:
    if not 0 < low < 1:
        raise ValueError(f"clip_low = {low} is not allowed: a number in (0, 1)")
    if not high > 0:
        raise ValueError(f"clip_high = {high} is not allowed: a number > 0")
    if dual is not None and not dual > 1:
        raise ValueError(f"dual_clip = {dual} is not allowed: a number > 1, or None")


def _denominator(name: str, given: float | Tensor | None, mask: Tensor, counted: Tensor) -> float | Tensor:
    """The given denominator, or else the counted one; 1 in place of 0 if nothing is valid (the numerator is 0 then)."""
    if given is None:
        return counted.clamp(min=1)
    number = float(given)
    if not (math.isfinite(number) and number >= 0) or (number == 0 and bool(mask.any())):
        allowed = "a finite number > 0, or 0 where no token is valid"
        raise ValueError(f"denominator {name} = {number:g} is not allowed: {allowed}")
    return given if number else 1.0
