"""Statistics over the valid elements of all ranks.

Sums are taken in float64, added up over the ranks, and only then divided; a mean of the ranks' means is wrong if ranks
hold different numbers of valid elements. A rank without a valid element takes part in every reduction. Masked elements
are replaced by 0, not multiplied by 0, so they may hold NaN or infinity. On a valid element NaN stays visible. Nothing
here carries a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.accelerators.device import reduces_float64

ROUNDING_ULPS = 4.0
"""A standard deviation of at most this many units in the last place of the mean is rounding error, not spread."""


SUM_ROUNDING = 8 * torch.finfo(torch.float64).eps
"""A sum of squared deviations of at most this share of the sum of squares is float64 rounding error."""


@dataclass(frozen=True)
class Moments:
    """Mean, unbiased variance and number of elements, each a float64 scalar; 0 where there is nothing to measure."""

    mean: Tensor
    var: Tensor
    count: Tensor

    @property
    def std(self) -> Tensor:
        return self.var.sqrt()

    def flat(self, dtype: torch.dtype) -> Tensor:
        """Whether elements given in ``dtype`` were all equal up to rounding (or fewer than two). False for NaN."""
        return self.std <= ROUNDING_ULPS * torch.finfo(dtype).eps * self.mean.abs()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks as a new tensor; without ``torch.distributed`` the tensor itself."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor) -> Tensor:
    """The largest value over ranks as a new tensor; without ``torch.distributed`` the tensor itself."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def largest_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each number over ranks; without ``torch.distributed`` the numbers themselves."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    return all_reduce_max(torch.tensor(values, dtype=torch.float64, device=device)).tolist()


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    reduced = tensor.detach().clone()
    if reduced.dtype == torch.float64 and not reduces_float64(reduced.device):
        parts = [torch.empty_like(reduced) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, reduced)
        gathered = torch.stack(parts)
        return gathered.sum(0) if operation == dist.ReduceOp.SUM else gathered.amax(0)
    dist.all_reduce(reduced, op=operation)
    return reduced


def require_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would only fit by broadcasting, which makes sums and counts disagree.

    Raises:
        ValueError: naming every argument and its shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {shapes}; allowed is one common shape")


def require_float32(**tensors: Tensor | None) -> None:
    """Refuse float16 and bfloat16, whose range (e^20 overflows) or precision is too small for these formulas.

    Raises:
        ValueError: naming the argument, its dtype and what is allowed.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {tensor.dtype}: float32 and float64 are allowed, convert it with .float()")


def select_valid(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask`` is true and 0 elsewhere; no value and no gradient passes at masked elements."""
    return torch.where(mask.bool(), x, 0.0)


@torch.no_grad()
def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of the valid elements **of this rank**, as a float64 scalar."""
    return select_valid(x, mask).sum(dtype=torch.float64)


@torch.no_grad()
def masked_mean(x: Tensor, mask: Tensor, *, reduce: bool = True) -> Tensor:
    """Mean of the valid elements, of all ranks where ``reduce`` is true, as a float64 scalar; 0 without any."""
    require_same_shape(x=x, mask=mask)
    sums = torch.stack([masked_sum(x, mask), mask.bool().sum(dtype=torch.float64)])
    total, count = (all_reduce_sum(sums) if reduce else sums).unbind()
    return total / count.clamp(min=1)


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor, *, reduce: bool = True) -> Moments:
    """Mean and unbiased variance of the valid elements.

    Two passes, the mean first and then squared deviations from it: E[x^2] - E[x]^2 would lose all digits where the
    mean is large beside the spread.

    Args:
        x: any shape.
        mask: of the same shape; true on valid elements.
        reduce: over all ranks (two small reductions); otherwise this rank alone.
    """
    require_same_shape(x=x, mask=mask)
    sums = torch.stack([masked_sum(x, mask), mask.bool().sum(dtype=torch.float64)])
    total, count = (all_reduce_sum(sums) if reduce else sums).unbind()
    mean = total / count.clamp(min=1)
    squares = masked_sum((x.double() - mean).square(), mask)
    squares = all_reduce_sum(squares) if reduce else squares
    return Moments(mean, squares / (count - 1).clamp(min=1), count)


def deviation_of_sums(total: float, squares: float, count: float, *, unbiased: bool = True) -> float:
    """Standard deviation from sums of elements and of their squares, for metrics, which are reduced once.

    Accurate to a part in 10^7 of the mean, as float32 elements are; less is rounding error and returned as 0.

    Args:
        total, squares: sums in float64 over at least one element.
        count: number of elements.
        unbiased: divide by ``count - 1``, at least 1.
    """
    spread = squares - total * total / count
    if not math.isfinite(spread):
        return spread
    return math.sqrt(spread / max(count - unbiased, 1.0)) if spread > SUM_ROUNDING * squares else 0.0


@torch.no_grad()
def standardise(x: Tensor, moments: Moments, *, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)``, in the dtype of ``x``; all zeros if the elements are equal up to rounding.

    A number that is not finite stays not finite.
    """
    scale = torch.where(moments.flat(x.dtype), 0.0, (moments.var + eps).rsqrt())
    return ((x.double() - moments.mean) * scale).to(x.dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Valid elements to mean 0 and variance 1 over all ranks, as veRL and TRL do (unbiased variance).

    Args:
        x: any shape, any floating dtype; computed in float64 and rounded to its dtype at the end.
        mask: of the same shape; true on valid elements.
        shift_mean: false keeps the mean and changes the spread alone.
        eps: added to the variance.

    Returns:
        A tensor like ``x`` with 0 at masked elements. A single valid element, or elements equal up to rounding, give
        0 (the mean, if it is kept).
    """
    moments = masked_moments(x, mask)
    whitened = standardise(x, moments, eps=eps)
    return select_valid(whitened if shift_mean else whitened + moments.mean.to(x.dtype), mask)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of the returns that the values predict: ``1 - Var(returns - values) / Var(returns)``.

    1 is a perfect critic (up to a constant), 0 one no better than the mean; it may be negative. Returns that are all
    equal give 0, not NaN.

    Args:
        values, returns: of one shape.
        mask: of the same shape; true on valid elements of this rank. All ranks are counted.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    target = masked_moments(returns, mask)
    residual = masked_moments(returns.double() - values.double(), mask)
    return torch.where(target.flat(returns.dtype), 0.0, 1.0 - residual.var / target.var)
