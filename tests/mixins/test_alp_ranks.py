"""The noise under data parallelism: two processes against one that plays both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.functional.stats import all_reduce_max
from lightning_rlhf.models import Actor, build_tiny
from lightning_rlhf.models.perturbation import Perturbation
from tests.ranks import run_ranks

ROWS = 4


class Perturbed(nn.Module):
    """Actor and noise as one module, as they are parts of one in training."""

    def __init__(self) -> None:
        super().__init__()
        lm = build_tiny("0123456789", hidden_size=16, layers=2, heads=2).lm
        self.actor, self.perturbation = Actor(lm), Perturbation(lm, init_sigma=0.1)

    def forward(self, ids: Tensor, rank: int) -> Tensor:
        with self.perturbation.noise(step=1, part=0, rank=rank):
            return self.actor(ids, torch.ones_like(ids, dtype=torch.bool), 5).logprobs.mean()


def batch() -> Tensor:
    return torch.randint(2, 12, (ROWS, 9), generator=torch.Generator().manual_seed(0))


def worker(rank: int) -> dict[str, Any]:
    """One of two ranks: its half of the rows; gradients are averaged by DistributedDataParallel."""
    module = nn.parallel.DistributedDataParallel(Perturbed())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(batch()[rank * ROWS // 2 : (rank + 1) * ROWS // 2], rank).backward()
    gradient = module.module.perturbation.log_sigma.grad.clone()
    weight = module.module.actor.lm.model.layers[0].mlp.up_proj.weight.grad.flatten()[:20].clone()
    optimizer.step()
    log_sigma = module.module.perturbation.log_sigma.detach()
    difference = all_reduce_max(log_sigma) + all_reduce_max(-log_sigma)
    return {"sigma": gradient, "weight": weight, "difference": float(difference.max())}


def test_two_ranks_have_the_gradients_of_one_that_plays_both(tmp_path: Path) -> None:
    ranks = run_ranks(worker, folder=tmp_path)
    module = Perturbed()
    for rank, half in enumerate(batch().chunk(2)):
        (module(half, rank) / 2).backward()
    weight = module.actor.lm.model.layers[0].mlp.up_proj.weight.grad.flatten()[:20]
    for found in ranks:
        torch.testing.assert_close(found["sigma"], module.perturbation.log_sigma.grad)
        torch.testing.assert_close(found["weight"], weight)
        assert found["difference"] == 0.0
