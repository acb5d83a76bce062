"""The policy with and without its noise, beside the engine's: distances, and the tails of the ratio."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.experience import MiniBatch
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.stats import all_reduce_sum
from lightning_rlhf.metrics.correction_numbers import quantiles

BINS = 10
SMALLEST_VARIANCE = 1e-12
"""Of probabilities; below it is rounding error, whose correlation means nothing."""


class RatioTails(NamedTuple):
    """Percentiles of log(trainer / engine) of tokens whose engine probability lies in ``[low, high)``."""

    low: float
    high: float
    tokens: int
    plain: tuple[float, float]
    """P2 and P98 without noise."""
    perturbed: tuple[float, float]
    """P2 and P98 with noise."""


class PolicyComparison:
    """Log-probabilities of the same tokens under three policies, gathered over a few micro-batches."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def __len__(self) -> int:
        """Micro-batches gathered."""
        return len(self._parts)

    @torch.no_grad()
    def add(self, minibatch: MiniBatch, perturbed: Tensor, plain: Tensor) -> None:
        """Take in the valid tokens of a micro-batch; ``perturbed`` and ``plain`` are ``[B, R]``."""
        rollout = minibatch.rollout_logprobs
        mask = minibatch.require("loss_mask") & rollout.isfinite()
        self._parts.append(torch.stack([plain[mask], perturbed[mask], rollout[mask]]).double())

    def metrics(self) -> dict[str, float]:
        """KL(plain || perturbed), estimator k3, and both correlations with the engine's probabilities, of all ranks.

        Absent without a token; a correlation also if one of the two does not vary. Collective: all ranks call it.
        """
        plain, perturbed, rollout = self._tokens()
        kl = kl_estimate(plain, perturbed, "k3").sum()
        p, q, e = plain.exp(), perturbed.exp(), rollout.exp()
        products = [x.sum() for x in (p, q, e, p * p, q * q, e * e, p * e, q * e)]
        n, kl, *sums = all_reduce_sum(torch.stack([plain.new_tensor(plain.numel()), kl, *products])).tolist()
        if not n:
            return {}
        numbers = {"alp/kl_perturbed": kl / n}
        p1, q1, e1, p2, q2, e2, pe, qe = (value / n for value in sums)
        for name, x1, x2, xe in (("plain", p1, p2, pe), ("perturbed", q1, q2, qe)):
            spreads = x2 - x1 * x1, e2 - e1 * e1
            if min(spreads) > SMALLEST_VARIANCE:
                numbers[f"alp/correlation_{name}"] = (xe - x1 * e1) / math.sqrt(spreads[0] * spreads[1])
        return numbers

    def tails(self) -> list[RatioTails]:
        """The percentiles by tenths of the engine's probability, of **this rank's** tokens; without empty tenths."""
        plain, perturbed, rollout = self._tokens().cpu()  # one transfer instead of many small ones
        place = (rollout.exp() * BINS).long().clamp(0, BINS - 1)
        found = []
        for index in range(BINS):
            here = place == index
            if here.any():
                pairs = [quantiles((x - rollout)[here], (2, 98)).tolist() for x in (plain, perturbed)]
                edges = index / BINS, (index + 1) / BINS
                found.append(RatioTails(*edges, int(here.sum()), tuple(pairs[0]), tuple(pairs[1])))
        return found

    def _tokens(self) -> Tensor:
        """``[3, N]``: plain, perturbed, engine."""
        return torch.cat(self._parts, dim=1)
