"""Which rows of the experience form which minibatch, and on which rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rlhf.distributed.parallel import balanced_shares
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.experience import Experience, MiniBatch, sample_seed


class MinibatchPlan:
    """Which rows form which minibatch: a new permutation per epoch, each row exactly once per epoch.

    The permutation depends on seed, iteration and epoch alone, so a resumed run draws the same ones, on any number of
    ranks. Each minibatch is divided among the ranks by tokens.

    Args:
        experience: the rows of all ranks, the same on each.
        size: rows of a minibatch, over all ranks.
        seed: of the run.
        iteration: counted from 1.
    """

    def __init__(self, experience: Experience, size: int, seed: int, iteration: int) -> None:
        self._valid: list[int] = experience.require("loss_mask").sum(-1).tolist()
        self._lengths = experience.lengths()
        self._size, self._seed, self._iteration = size, seed, iteration

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return -(-len(self._valid) // self._size)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, list[tuple[int, int]], float, float]]:
        """Of each minibatch: this rank's rows and their lengths, and over all ranks the valid tokens and the sequences
        with a valid token, which are known before the first backward pass."""
        rank, world = place()
        generator = torch.Generator().manual_seed(sample_seed(self._seed, "minibatches", self._iteration, epoch))
        for chunk in torch.randperm(len(self._valid), generator=generator).split(self._size):
            counts = [self._valid[row] for row in chunk.tolist()]
            costs = [sum(self._lengths[row]) for row in chunk.tolist()]
            mine = chunk[balanced_shares(costs, world)[rank]]
            lengths = [self._lengths[row] for row in mine.tolist()]
            yield mine, lengths, float(sum(counts)), float(sum(n > 0 for n in counts))

    def idle(self, experience: Experience, tokens: float, sequences: float) -> tuple[MiniBatch, list[tuple[int, int]]]:
        """One row without a valid token, and its lengths: its loss is 0, and so are its gradients."""
        row = min(range(len(self._lengths)), key=lambda i: sum(self._lengths[i]))
        minibatch = MiniBatch.from_experience(experience, torch.tensor([row]), tokens, sequences)
        return without_loss(minibatch), [self._lengths[row]]


def without_loss(micro: MiniBatch) -> MiniBatch:
    """The last row of a micro-batch, its shortest, with no valid token: its loss is 0, and so are its gradients."""
    row = micro.select(torch.tensor([len(micro) - 1]))
    return replace(row, loss_mask=torch.zeros_like(row.require("loss_mask")))
