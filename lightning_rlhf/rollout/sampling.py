"""Drawing tokens from logits, each row from its own stream of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.rollout.base import Sampling

_BLOCK = 256
"""Tokens per block of :func:`inverse_cdf`; near the square root of common vocabulary sizes."""


def row_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """``[B, count]`` float64 uniforms in [0, 1), row ``b`` from a stream that is a function of ``seeds[b]`` alone.

    A longer ``count`` continues the same stream. Counter-based generators (Philox, Salmon et al. 2011) use all bits
    of the seed, where ``torch.Generator`` on the CPU keeps 32. The global random state is neither read nor changed.
    """
    streams = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(streams))


def truncate(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits ``[N, V]`` with -inf on the tokens that top-k, then top-p (Holtzman et al. 2020) exclude.

    Top-p looks at the distribution renormalised after top-k. Tokens that tie with the last one kept are kept, so the
    support is a function of the logits and not of a sorting order.
    """
    if top_k == 0 and top_p == 1.0:
        return logits
    vocabulary = logits.shape[-1]
    likeliest = logits.topk(min(top_k or vocabulary, vocabulary), dim=-1).values
    if top_p < 1.0:
        probs = likeliest.softmax(-1)
        mass_before = probs.cumsum(-1) - probs
        others = (mass_before < top_p).sum(-1, keepdim=True) - 1  # beside the likeliest
        cutoff = likeliest.gather(-1, others.clamp(min=0))  # the clamp acts on NaN only
    else:
        cutoff = likeliest[:, -1:]
    return logits.masked_fill(logits < cutoff, -math.inf)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index ``[N]`` of the first token whose cumulative probability exceeds ``uniforms * total``.

    Args:
        probs: ``[N, V]`` non-negative weights; they need not sum to one. A weight of zero is never chosen.
        uniforms: ``[N]`` float64 in [0, 1).

    The draw first picks a block of tokens by the blocks' sums and then a token inside it: one vectorised pass over
    the vocabulary, with float64 cumulative sums on small tensors only.
    """
    vocabulary = probs.shape[-1]
    blocks = F.pad(probs, (0, -vocabulary % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block, inside = _choose(blocks.sum(-1), uniforms.unsqueeze(-1))
    token, _ = _choose(blocks[torch.arange(len(probs), device=probs.device), block.squeeze(-1)], inside)
    return (block * _BLOCK + token).squeeze(-1).clamp(max=vocabulary - 1)


def _choose(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Entry of ``weights [N, K]`` in which ``fraction [N, 1]`` of the total falls, and how far into it, in [0, 1).

    In float64 a number below 1 times the total is below the total, so the search always ends at a positive weight.
    """
    weights = weights.double()
    cdf = weights.cumsum(-1)
    target = fraction * cdf[:, -1:]
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)  # the clamp acts on NaN only
    chosen = weights.gather(-1, index)
    return index, ((target - cdf.gather(-1, index) + chosen) / chosen).clamp(min=0)


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability under the distribution it was drawn from.

    Args:
        logits: ``[N, V]`` in any dtype; processed in float32.
        uniforms: ``[N]`` float64 in [0, 1); not read in greedy mode.
        sampling: temperature, top-k, top-p, greedy.

    Returns:
        ``tokens [N]`` int64 and ``logprobs [N]`` float32 (nats). Greedy tokens are no draws: they come with their
        log-probability under the full distribution at ``sampling.temperature``.
    """
    logits = logits.float()
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.greedy:
        probs = logits.softmax(-1)
        tokens = logits.argmax(-1)
    else:
        probs = truncate(logits, sampling.top_k, sampling.top_p).softmax(-1)
        tokens = inverse_cdf(probs, uniforms)
    return tokens, probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
