"""Mean and variance of everything seen so far, for running normalisation of rewards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_rlhf.functional.stats import Moments, masked_moments, standardise


class RunningMoments(nn.Module):
    """Streaming mean and unbiased variance, equal to those of all data at once in any batching.

    Batches are merged by the formula of Chan, Golub and LeVeque (1979), in float64: count, mean and the sum of squared
    deviations. Each batch is reduced over the ranks **as it comes**, so every rank holds the same state and a resumed
    run may have another number of ranks.

    This is no ``torchmetrics.Metric``: those reduce their states by summing them over ranks at the end. Sums of powers
    would allow that and lose all digits where the mean is large; the merged state does not add up that way.

    The state is the module's extra state: it is in ``state_dict`` (float64, loaded strictly) but no buffer, because
    ``module.to(torch.bfloat16)`` casts buffers, and eight bits of mantissa are too few for a running mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = torch.zeros(3, dtype=torch.float64)  # count, mean, sum of squared deviations

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in the valid elements of all ranks; every rank calls this equally often.

        An element that is not finite is left out: it stays visible in its own batch (:meth:`normalise` keeps it), but
        must not spoil later batches.

        Args:
            x: any shape, e.g. ``[B]`` scores; it may be empty.
            mask: of the same shape, true on valid elements; default: all.
        """
        valid = x.isfinite() if mask is None else x.isfinite() & mask.bool()
        batch = masked_moments(x, valid)
        count, mean, squares = self._state.to(x.device).unbind()
        total = count + batch.count
        share = batch.count / total.clamp(min=1)
        delta = batch.mean - mean
        squares = squares + batch.var * (batch.count - 1).clamp(min=0) + delta.square() * count * share
        self._state = torch.stack([total, mean + delta * share, squares])

    def normalise(self, x: Tensor, *, eps: float = 1e-8) -> Tensor:
        """``(x - mean) / sqrt(var + eps)``; zeros until two different values were seen."""
        return standardise(x, self._moments(x.device), eps=eps)

    @property
    def count(self) -> Tensor:
        return self._moments().count

    @property
    def mean(self) -> Tensor:
        return self._moments().mean

    @property
    def var(self) -> Tensor:
        """Unbiased (n - 1); 0 for fewer than two values."""
        return self._moments().var

    @property
    def std(self) -> Tensor:
        return self._moments().std

    def _moments(self, device: torch.device | None = None) -> Moments:
        count, mean, squares = self._state.to(device or self._state.device).unbind()
        return Moments(mean, squares / (count - 1).clamp(min=1), count)

    def get_extra_state(self) -> Tensor:
        return self._state  # replaced by updates, never changed in place

    def set_extra_state(self, state: Tensor) -> None:
        self._state = state.to(torch.float64)
