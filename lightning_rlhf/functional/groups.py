"""Statistics per group of rows, over all ranks. Row ``i`` belongs to group ``members[i]`` of ``groups``.

As in :mod:`lightning_rlhf.functional.stats`: sums in float64 over valid elements, added up over the ranks and then
divided. Every rank knows the same groups in the same order, and takes part with 0 where it has no row of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.functional.stats import Moments, all_reduce_sum, require_same_shape, select_valid


@torch.no_grad()
def group_sum(x: Tensor, members: Tensor, groups: int) -> Tensor:
    """``[G]`` float64 sums **of this rank**.

    A mask in place of ``index_add``, whose order of summation, and so rounding, varies on GPUs.

    Args:
        x: ``[B]``, one number per row.
        members: ``[B]`` int64, the group of each row.
        groups: G.
    """
    require_same_shape(x=x, members=members)
    mine = members == torch.arange(groups, device=members.device).unsqueeze(-1)
    return torch.where(mine, x.double(), 0.0).sum(-1)


@torch.no_grad()
def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """``[B]`` float64 sums of each row's valid elements; ``x`` is ``[B]`` or ``[B, R]``."""
    require_same_shape(x=x, mask=mask)
    valid = select_valid(x, mask).double()
    return valid if valid.ndim == 1 else valid.sum(-1)


@torch.no_grad()
def group_moments(x: Tensor, mask: Tensor, members: Tensor, groups: int, *, reduce: bool = True) -> Moments:
    """Mean, unbiased variance and number of the valid elements of each group, ``[G]`` float64; 0 in an empty group.

    Args:
        x: ``[B]`` or ``[B, R]``.
        mask: of the same shape; true on valid elements.
        members: ``[B]`` int64, the group of each row.
        groups: G.
        reduce: over all ranks (two small reductions); otherwise this rank alone.
    """
    counts = mask.bool().double() if mask.ndim == 1 else mask.sum(-1, dtype=torch.float64)
    sums = torch.stack([group_sum(row_sums(x, mask), members, groups), group_sum(counts, members, groups)])
    total, count = (all_reduce_sum(sums) if reduce else sums).unbind()
    mean = total / count.clamp(min=1)
    squares = group_sum(row_sums((x.double() - of_rows(mean, members, x)).square(), mask), members, groups)
    squares = all_reduce_sum(squares) if reduce else squares
    return Moments(mean, squares / (count - 1).clamp(min=1), count)


def merged(first: Moments, second: Moments) -> Moments:
    """The moments of two parts together (Chan, Golub and LeVeque 1979), element by element."""
    count = first.count + second.count
    share = second.count / count.clamp(min=1)
    delta = second.mean - first.mean
    squares = sum(part.var * (part.count - 1).clamp(min=0) for part in (first, second))
    squares = squares + delta.square() * first.count * share
    return Moments(first.mean + delta * share, squares / (count - 1).clamp(min=1), count)


@torch.no_grad()
def standardise_groups(
    x: Tensor, members: Tensor, moments: Moments, whole: Moments, few: Tensor, *, eps: float = 1e-8
) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` with the moments of each row's group, in the dtype of ``x``.

    As in :func:`~lightning_rlhf.functional.stats.standardise`, a group whose elements are equal up to rounding gives 0.

    Args:
        x: ``[B]`` or ``[B, R]``.
        members: ``[B]`` int64, the group of each row.
        moments: ``[G]``, of each group.
        whole: scalars, of all groups together.
        few: ``[G]`` bool, groups that are too small for numbers of their own and take those of ``whole``.
        eps: added to the variance.
    """
    mean = torch.where(few, whole.mean, moments.mean)
    own, common = (torch.where(m.flat(x.dtype), 0.0, (m.var + eps).rsqrt()) for m in (moments, whole))
    scale = torch.where(few, common, own)
    return ((x.double() - of_rows(mean, members, x)) * of_rows(scale, members, x)).to(x.dtype)


def of_rows(numbers: Tensor, members: Tensor, like: Tensor) -> Tensor:
    """The number of each row's group, ``[B]`` or ``[B, 1]`` as fits ``like``."""
    return numbers[members].view(-1, *[1] * (like.ndim - 1))
