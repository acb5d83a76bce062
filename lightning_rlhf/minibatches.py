"""Which rows of the experience form which minibatch, and on which rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rlhf.distributed.parallel import balanced_shares
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.experience import Experience, MiniBatch, sample_seed
from lightning_rlhf.functional.losses import TOKEN_MEAN, LossScale


class MinibatchPlan:
    """Which rows form which minibatch: a new permutation per epoch, each row exactly once per epoch.

    The permutation depends on seed, iteration and epoch alone, so a resumed run draws the same permutations, on any
    number of ranks. Each minibatch is divided among the ranks by tokens.

    Args:
        experience: the rows of all ranks, the same on each.
        size: rows of a minibatch, over all ranks.
        seed: of the run.
        iteration: counted from 1.
        scale: of the loss; each minibatch gets a copy with its own counts.
    """

    def __init__(
        self, experience: Experience, size: int, seed: int, iteration: int, scale: LossScale = TOKEN_MEAN
    ) -> None:
        self._valid: list[int] = experience.require("loss_mask").sum(-1).tolist()
        self._lengths = experience.lengths()
        self._size, self._seed, self._iteration, self._scale = size, seed, iteration, scale

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return -(-len(self._valid) // self._size)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, list[tuple[int, int]], LossScale]]:
        """Of each minibatch: this rank's rows, their lengths, and the scale of the loss with the valid tokens and the
        sequences with a valid token over all ranks, which are known before the first backward pass."""
        rank, world = place()
        generator = torch.Generator().manual_seed(sample_seed(self._seed, "minibatches", self._iteration, epoch))
        for chunk in torch.randperm(len(self._valid), generator=generator).split(self._size):
            counts = [self._valid[row] for row in chunk.tolist()]
            costs = [sum(self._lengths[row]) for row in chunk.tolist()]
            mine = chunk[balanced_shares(costs, world)[rank]]
            lengths = [self._lengths[row] for row in mine.tolist()]
            scale = replace(self._scale, tokens=float(sum(counts)), sequences=float(sum(n > 0 for n in counts)))
            yield mine, lengths, scale

    def idle(self, experience: Experience, scale: LossScale) -> tuple[MiniBatch, list[tuple[int, int]]]:
        """One row without a valid token, and its lengths: its loss is 0, and so are its gradients."""
        row = min(range(len(self._lengths)), key=lambda i: sum(self._lengths[i]))
        minibatch = MiniBatch.from_experience(experience, torch.tensor([row]), scale)
        return without_loss(minibatch), [self._lengths[row]]


def without_loss(micro: MiniBatch) -> MiniBatch:
    """The last row of a micro-batch, its shortest, with no valid token: its loss is 0, and so are its gradients."""
    row = micro.select(torch.tensor([len(micro) - 1]))
    return replace(row, loss_mask=torch.zeros_like(row.require("loss_mask")))
