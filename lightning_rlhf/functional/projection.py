"""Vectors of texts: the mean over a text's tokens, and coordinates in a plane."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row's real tokens, in float32.

    Args:
        values: ``[B, T]`` or ``[B, T, H]`` float.
        mask: ``[B, T]`` bool, true on the tokens that count; the others may hold NaN.

    Returns:
        ``[B]`` or ``[B, H]`` float32; 0 in a row without a token.
    """
    if values.shape[:2] != mask.shape:
        raise ValueError(f"mean_over_tokens: values {tuple(values.shape)} and mask {tuple(mask.shape)} differ")
    kept = mask if values.dim() == 2 else mask[..., None]
    return torch.where(kept, values.float(), 0.0).sum(1) / kept.sum(1).clamp(min=1)


def principal_components(vectors: Tensor, count: int = 2) -> Tensor:
    """Coordinates along the directions of largest variance (PCA, Pearson 1901), by a singular value decomposition.

    A direction's sign is free: the one is taken in which the point that lies farthest out has a positive coordinate,
    so the same vectors give the same picture.

    Args:
        vectors: ``[N, D]`` float.
        count: number of directions; those beyond ``min(N, D)`` have coordinate 0.

    Returns:
        ``[N, count]`` float64, in the units of ``vectors``, mean 0.
    """
    centred = vectors.double() - vectors.double().mean(0)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    found = (left * sizes)[:, :count]
    farthest = found.gather(0, found.abs().argmax(0, keepdim=True))
    found = found * torch.where(farthest < 0, -1.0, 1.0)
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))
