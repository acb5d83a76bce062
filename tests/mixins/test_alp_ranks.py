"""The noise under data parallelism: two processes against one that plays both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_rlhf.models import Actor, build_tiny
from lightning_rlhf.models.perturbation import Perturbation

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


def worker(rank: int, port: int, folder: str) -> None:
    """One of two ranks: its half of the rows; gradients are averaged by DistributedDataParallel."""
    import torch.distributed as dist

    from lightning_rlhf.functional.stats import all_reduce_max

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module = nn.parallel.DistributedDataParallel(Perturbed())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(batch()[rank * ROWS // 2 : (rank + 1) * ROWS // 2], rank).backward()
    gradient = module.module.perturbation.log_sigma.grad.clone()
    weight = module.module.actor.lm.model.layers[0].mlp.up_proj.weight.grad.flatten()[:20].clone()
    optimizer.step()
    log_sigma = module.module.perturbation.log_sigma.detach()
    difference = all_reduce_max(log_sigma) + all_reduce_max(-log_sigma)
    if rank == 0:
        found = {"sigma": gradient.tolist(), "weight": weight.tolist(), "difference": float(difference.max())}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_ranks_have_the_gradients_of_one_that_plays_both(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    call = "from tests.mixins.test_alp_ranks import worker; worker({rank}, {port}, {folder!r})"
    codes = [call.format(rank=rank, port=port, folder=str(tmp_path)) for rank in (0, 1)]
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=root) for code in codes]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    found = json.loads((tmp_path / "found.json").read_text())

    module = Perturbed()
    for rank, half in enumerate(batch().chunk(2)):
        (module(half, rank) / 2).backward()
    torch.testing.assert_close(torch.tensor(found["sigma"]), module.perturbation.log_sigma.grad)
    weight = module.actor.lm.model.layers[0].mlp.up_proj.weight.grad.flatten()[:20]
    torch.testing.assert_close(torch.tensor(found["weight"]), weight)
    assert found["difference"] == 0.0
