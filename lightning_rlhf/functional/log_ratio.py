"""The log-ratio between trainer and engine, from which weights, rejection and metrics are computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.functional.stats import require_same_shape, select_valid


class LogRatio(NamedTuple):
    """Trainer minus engine, in nats; 0 where nothing was measured.

    Attributes:
        token: ``[B, R]``.
        total: ``[B, 1]``, sum over the row.
        mean: ``[B, 1]``, mean over the row's measured tokens.
        measured: ``[B, R]`` bool, valid tokens whose log-probability the engine reported.
        missing: ``[B, R]`` bool, valid tokens where it reported NaN or infinity.
        length: ``[B, 1]``, number of measured tokens.
    """

    token: Tensor
    total: Tensor
    mean: Tensor
    measured: Tensor
    missing: Tensor
    length: Tensor


@torch.no_grad()
def log_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> LogRatio:
    """Log-ratios of the sampled tokens.

    The difference is taken in float32 at least: two log-probabilities near -10 in bfloat16 are each off by 0.03, which
    is the size of the gap to be measured. NaN of the **trainer** on a valid token stays visible.

    Args:
        train_logprobs: ``[B, R]``, the trainer's; may carry a gradient, which is cut off here.
        rollout_logprobs: ``[B, R]``, the engine's, under the distribution it sampled from.
        mask: ``[B, R]``, true on response tokens.
    """
    require_same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    dtype = torch.promote_types(train_logprobs.dtype, torch.float32)
    mask = mask.bool()
    measured = mask & rollout_logprobs.isfinite()
    token = select_valid(train_logprobs.to(dtype) - rollout_logprobs.to(dtype), measured)
    length = measured.sum(-1, keepdim=True)
    total = token.sum(-1, keepdim=True)
    return LogRatio(token, total, total / length.clamp(min=1), measured, mask & ~measured, length)
