"""Estimators of the KL divergence between two policies, and a controller of its coefficient."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_rlhf.functional.choices import KLEstimator
from lightning_rlhf.functional.stats import require_float32, require_same_shape, select_valid

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before ``exp``: e^20 is 4.9e8, beyond any meaningful ratio."""

MAX_RELATIVE_ERROR = 0.2
MIN_FACTOR = 0.1
"""Bounds of one controller step: of the relative error, and of the factor, which must never reach 0."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator, *, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, for tokens sampled from the policy.

    With ``d = log ref - log policy`` (Schulman, "Approximating KL divergence", 2020): ``k1 = -d``, unbiased and of
    either sign; ``k2 = d^2 / 2``, biased and never negative; ``k3 = exp(d) - 1 - d``, unbiased and never negative;
    ``abs = |d|``. Only in k3 ``d`` is clamped to +-20; beyond the bound value and derivative stay those at the bound,
    so that the worst tokens are finite and still pulled back. The value of k3 is not clamped.

    Args:
        logprobs: of the sampled tokens under the policy, any shape, e.g. ``[B, R]``.
        ref_logprobs: of the same tokens under the reference, same shape.
        kind: the estimator.
        mask: same shape, true on valid tokens; masked ones give 0 and no gradient, whatever they hold. Needed where
            padding may hold NaN and a gradient is taken.

    Raises:
        ValueError: an unknown estimator, shapes that differ, float16 or bfloat16 (float32 and float64 are allowed), or
            a gradient of k1 asked for: that is the gradient of the log-probability alone, zero on average and
            independent of the reference, so k1 is no loss term.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    require_float32(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if kind not in get_args(KLEstimator):
        raise ValueError(f"KL estimator {kind!r} is not allowed: one of {', '.join(get_args(KLEstimator))}")
    log_ratio = ref_logprobs - logprobs
    if mask is not None:
        log_ratio = select_valid(log_ratio, mask)
    if kind == "k1":
        if log_ratio.requires_grad:
            raise ValueError(
                "KL estimator 'k1' cannot be a loss term, its gradient ignores the reference: k2 or k3 are allowed "
                "(detach the log-probabilities where only the value is wanted)"
            )
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "abs":
        return log_ratio.abs()
    bounded: Tensor = _ClampKeepGradient.apply(log_ratio, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


class _ClampKeepGradient(torch.autograd.Function):
    """Clamp to +- ``bound`` with derivative 1 everywhere; that of ``clamp`` is 0 beyond the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def proportional_kl_update(beta: float, kl: float, *, target: float, horizon: float, steps: float) -> float:
    """The KL coefficient after one step of the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593).

    ``beta * (1 + clip(kl / target - 1, -0.2, 0.2) * steps / horizon)``. The factor is at least 0.1: with more steps
    than five horizons it would turn 0 or negative, and the coefficient could never recover.

    Args:
        beta: coefficient in force.
        kl: measured KL, in the unit of ``target``; NaN (nothing was measured) changes nothing.
        target: KL to aim at.
        horizon: number of ``steps`` over which a relative error of 1 would change beta by its own size.
        steps: sequences since the last call.

    Raises:
        ValueError: target or horizon is not a finite number > 0, or steps is not a finite number >= 0.
    """
    for name, value in (("target", target), ("horizon", horizon)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"KL controller: {name} = {value} is not allowed: a finite number > 0")
    if not (math.isfinite(steps) and steps >= 0):
        raise ValueError(f"KL controller: steps = {steps} is not allowed: a finite number >= 0")
    if math.isnan(kl):
        return beta
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return beta * max(1.0 + error * steps / horizon, MIN_FACTOR)
