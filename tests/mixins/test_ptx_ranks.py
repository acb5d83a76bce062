"""PPO-ptx and its controller on two processes: the numbers of one. FSDP2 is in tests/distributed/test_fsdp2.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import AdaptivePTX
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.distributed.strategies import DDPStrategy
from tests.mixins.test_ptx import BLOCKS, First, ptx_module
from tests.ranks import run_ranks
from tests.support import fit, prompts


def different_on_every_rank(module: Any) -> float:
    """Over two ranks, and on one alone, the mean is 1 before the first step and 0.9 after."""
    spread = 0.1 if place()[1] > 1 else 0.0
    return (1.0 if module.control.iteration == 1 else 0.9) + (spread if place()[0] == 0 else -spread)


def train(rank: int, minibatch_size: int) -> dict[str, Any]:
    """Five blocks per step do not divide by two; a last minibatch of one row leaves a rank without rows."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    module, seen = ptx_module(iterations=3, update={"minibatch_size": minibatch_size}), First()
    steers = AdaptivePTX(every=1, smoothing=0.0, benchmarks={"mine": different_on_every_rank})
    several = {} if world == 1 else {"strategy": DDPStrategy(), "devices": world}
    trainer = fit(module, [seen, steers], data=prompts(module, per_iteration=8), **several)
    return {
        "gradients": seen.gradients,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if "ptx" in name},
        "state": steers.state_dict(),
        "position": module._ptx.stream.position,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


@pytest.mark.parametrize("minibatch_size", [8, 3])
def test_two_processes_train_on_the_text_as_one_does(tmp_path: Path, minibatch_size: int) -> None:
    alone = train(0, minibatch_size)
    first, second = run_ranks(train, minibatch_size, folder=tmp_path)
    assert alone["position"] % BLOCKS == 0 and alone["position"] > 0
    for rank in (first, second):
        assert rank["position"] == alone["position"] and rank["state"] == first["state"]
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
        assert all(torch.equal(weight, first["weights"][name]) for name, weight in rank["weights"].items())
        for name, expected in alone["gradients"].items():
            assert (rank["gradients"][name] - expected).norm() <= 1e-5 * expected.norm() + 1e-12, name
    assert alone["metrics"]["ptx/coefficient"] == pytest.approx(4 * 0.3), "doubled twice"
