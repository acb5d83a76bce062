"""Importance weights and rejection between the engine that sampled and the trainer that learns.

``l_t = log p_trainer - log p_engine`` of the sampled token, always in this order. Column ``t`` of every ``[B, R]``
tensor speaks of response token ``t``. Sums and means run over valid tokens first and are clamped to +-20 then, so that
no ``exp`` overflows; masked slots are replaced by 0 and may hold any value. Nothing here carries a gradient: a gradient
through the weights would change the objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.functional.kl import MAX_LOG_RATIO
from lightning_rlhf.functional.log_ratio import LogRatio, log_ratio
from lightning_rlhf.functional.rejection import Rule
from lightning_rlhf.functional.stats import all_reduce_sum, select_valid

WeightLevel = Literal["token", "sequence", "geometric"]
WeightMode = Literal["truncate", "mask"]
Missing = Literal["neutral", "reject"]


@dataclass(frozen=True)
class Plan:
    """Settings of :func:`correct`; its limits may change from batch to batch.

    Attributes:
        level: importance weights ``exp(l_t)`` (token), ``exp(sum l)`` (sequence) or ``exp(mean l)`` (geometric), the
            latter two the same for every token of a row; ``None`` for no weights.
        cap: largest weight.
        floor: smallest weight that ``mode: mask`` leaves; default ``1 / cap``.
        mode: truncate (TIS, weights above ``cap`` become ``cap``) or mask (MIS, weights outside become 0).
        normalise: divide the weights by their mean over accepted tokens (token level) or rows of all ranks, and cap
            them again.
        rules: a token has to pass all of them.
        veto: a row with a token of smaller ratio than this is rejected as a whole; ``None`` for no veto.
        missing: treatment of a token without a finite log-probability of the engine: ratio 1 (neutral), or its row is
            rejected (the product over the row is unknown).
    """

    level: WeightLevel | None = None
    cap: float = 2.0
    floor: float | None = None
    mode: WeightMode = "truncate"
    normalise: bool = False
    rules: tuple[Rule, ...] = ()
    veto: float | None = None
    missing: Missing = "neutral"

    @property
    def lowest(self) -> float:
        """Smallest weight that ``mode: mask`` leaves, by default ``1 / cap``."""
        return 1.0 / self.cap if self.floor is None else self.floor

    def adjusted(self, cap: float, scale: float) -> Plan:
        """A copy with another cap, and rejection bands ``scale`` times as wide."""
        return replace(self, cap=cap, rules=tuple(rule.scaled(scale) for rule in self.rules))


class Correction(NamedTuple):
    """Result of :func:`correct`; all tensors are detached.

    Attributes:
        plan: the plan that was applied.
        ratio: the log-ratios.
        raw: ``[B, R]`` (token level) or ``[B, 1]``: weights before truncation; ``None`` without weights.
        weights: ``[B, R]``, as the loss uses them, 0 at masked tokens; ``None`` without weights.
        keep: ``[B, R]`` bool, valid tokens that nothing rejected.
        passed: ``[B, R]`` or ``[B, 1]`` bool for each rule, whether it accepts.
        catastrophic: ``[B, R]`` bool, tokens that call for a veto; ``None`` without one.
        factor: scalar, the mean that the weights were divided by; ``None`` where they were not.
    """

    plan: Plan
    ratio: LogRatio
    raw: Tensor | None
    weights: Tensor | None
    keep: Tensor
    passed: tuple[Tensor, ...]
    catastrophic: Tensor | None
    factor: Tensor | None


@torch.no_grad()
def correct(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, plan: Plan) -> Correction:
    """Weights and accepted tokens of one batch.

    Each rule and the veto look at the original mask; rejection changes weights only through the mean that
    ``plan.normalise`` divides by.

    Args:
        train_logprobs, rollout_logprobs, mask: see :func:`log_ratio`.
        plan: what to do. With ``normalise`` every rank has to call this function.
    """
    ratio = log_ratio(train_logprobs, rollout_logprobs, mask)
    mask = ratio.measured | ratio.missing
    keep = mask
    passed = tuple(rule.accepts(rule.statistic(ratio)) for rule in plan.rules)
    for accepted in passed:
        keep = keep & accepted
    catastrophic = None
    if plan.veto is not None:
        catastrophic = ratio.token < math.log(plan.veto)  # not clamped; 0 where nothing was measured
        keep = keep & ~catastrophic.any(-1, keepdim=True)
    if plan.missing == "reject":
        keep = keep & ~ratio.missing.any(-1, keepdim=True)
    raw = weights = factor = None
    if plan.level is not None:
        raw = raw_weights(ratio, plan.level)
        weights = select_valid(bounded_weights(raw, plan).expand_as(mask), mask)
        if plan.normalise:
            weights, factor = normalised_weights(weights, keep, plan)
    return Correction(plan, ratio, raw, weights, keep, passed, catastrophic, factor)


def raw_weights(ratio: LogRatio, level: WeightLevel) -> Tensor:
    """Importance weights before any cap: ``[B, R]`` for tokens, ``[B, 1]`` for rows."""
    plain = {"token": ratio.token, "sequence": ratio.total, "geometric": ratio.mean}[level]
    return plain.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_weights(raw: Tensor, plan: Plan) -> Tensor:
    """Truncated (Ionides 2008; Espeholt et al. 2018) or masked weights; NaN stays NaN."""
    if plan.mode == "truncate":
        return raw.clamp(max=plan.cap)
    return torch.where((raw < plan.lowest) | (raw > plan.cap), 0.0, raw)


def normalised_weights(weights: Tensor, keep: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Weights over their mean, and that mean.

    The mean is over accepted tokens (token level) or over rows with an accepted token, of all ranks. Where there is
    none, or all weights are 0, nothing is divided. The cap is applied once more, so that it holds.
    """
    if plan.level == "token":
        values, counted = weights, keep
    else:
        # One weight per row, 0 at padding; amax fails on zero columns.
        values = weights.amax(-1) if weights.shape[-1] else weights.new_zeros(len(weights))
        counted = keep.any(-1)
    sums = torch.stack([select_valid(values, counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])
    total, count = all_reduce_sum(sums).unbind()
    factor = torch.where(total == 0, 1.0, total / count.clamp(min=1))
    return (weights / factor.to(weights.dtype)).clamp(max=plan.cap), factor


def storage_error(dtype: torch.dtype, cap: float) -> float:
    """Largest absolute error of a weight in ``[0, cap]`` that is rounded to ``dtype``: half the widest spacing there.

    In float16 this is 2^-10 up to a cap of 4; in bfloat16 already 2^-8 up to a cap of 2.
    """
    mantissa, exponent = math.frexp(cap)  # cap = mantissa * 2^exponent, 0.5 <= mantissa < 1
    binade = exponent - 1 if mantissa > 0.5 else exponent - 2  # a power of two is itself representable
    return 0.5 * torch.finfo(dtype).eps * 2.0**binade
