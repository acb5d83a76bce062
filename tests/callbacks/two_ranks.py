"""The scenarios that each of two processes runs for ``test_two_ranks.py``.

Both train one model under DDP. Each condition is caused on one rank; every decision uses reduced numbers.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lightning_rlhf import memory
from lightning_rlhf.callbacks import (
    AdaptiveKL,
    AdvantageVanish,
    ClipFractionBreak,
    EfficiencyStop,
    GradientMonitor,
    KLEarlyStop,
    KLGuard,
    LengthCurriculum,
    LRBackoff,
    OOMGuard,
    PromptMonitor,
    PromptRecords,
    RLHFCallback,
)
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import RewardBatch
from tests.support import DecisionLog, fit, prompts, tiny_module, weights

FAR: dict[str, Any] = {"actor": {"lr": 3e-2, "clip_norm": None}, "kl": {"estimator": "k3", "coefficient": 0.1}}
NEAR: dict[str, Any] = {"actor": {"lr": 1e-9}, "kl": {"estimator": "k3", "coefficient": 0.1}}
BOTH: dict[str, Any] = {"strategy": "ddp", "devices": 2}


class Broken(PPOModule):
    """The gradient of one rank is not finite, its loss is."""

    rank = 0

    def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
        loss = super().micro_batch_loss(micro, metrics)
        if dist.get_rank() == self.rank:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss


class OtherBroken(Broken):
    rank = 1


class Hungry(PPOModule):
    """Rank 1 has memory for three rows."""

    def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and len(micro) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return super().micro_batch_loss(micro, metrics)


def run(callbacks: list[RLHFCallback], **settings: Any) -> dict[str, Any]:
    """Everything the ranks must agree on after a run of three iterations, and whether any weight moved."""
    module, log = tiny_module(**{"iterations": 3, "update": {"minibatch_size": 16}, **settings}), DecisionLog()
    before = weights(module)
    with suppress(TrainingFailed):
        fit(module, callbacks, data=prompts(module, per_iteration=16), logger=log, **BOTH)
    moved = any(not torch.equal(before[name], weight) for name, weight in weights(module).items())
    decided = [(row["iteration"], row["update"], row["verb"]) for row in log.rows]
    return {
        "decided": decided,
        "control": module.control.state_dict(),
        "knobs": {name: module.control.value(name) for name in module.control.knobs},
        "stopped": module.control.training_stopped is not None,
        "gradients": sum(p.grad is not None for p in module.parameters()),
        "moved": moved,
    }


def same_batch(first: float, second: float, callback: Any, name: str) -> dict[str, Any]:
    """Minibatches whose local value of one statistic is ``first`` on rank 0 and ``second`` on rank 1."""
    own = first if dist.get_rank() == 0 else second

    class Given(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            loss = super().micro_batch_loss(micro, metrics)
            mask = micro.require("loss_mask")
            for kind in ("total", "count"):
                metrics._sums.pop((name, kind))
            # Equal weights, so that the mean over ranks is the mean of the two.
            metrics.mean(name, torch.full((1,), own).to(mask.device))
            return loss

    return run([callback], cls=Given, iterations=1)


def loud_on_rank_1(batch: RewardBatch) -> list[float]:
    """Advantages of about 0 on rank 0, of 900 on rank 1, and so of 450 together."""
    return [1000.0 * dist.get_rank()] * len(batch.responses)


def scenarios(rank: int) -> dict[str, Any]:
    results = {
        "KL 0.02 and 0.5": same_batch(0.02, 0.5, KLEarlyStop(0.1, per_minibatch=True), "kl/old"),
        "KL 0.02 and 0.1": same_batch(0.02, 0.1, KLEarlyStop(0.1, per_minibatch=True), "kl/old"),
        "clip 0.1 and 0.95": same_batch(0.1, 0.95, ClipFractionBreak(0.5, per_minibatch=True), "ppo/clip_fraction"),
        "KLEarlyStop": run([KLEarlyStop(1e-4, hard_limit=1e-3, rollback=True, patience=2)], **FAR),
        "KLGuard": run([KLGuard(target=1e-4, token_limit=0.1)], **FAR),
        "KLGuard, found in the run": run([KLGuard(jump=1e-3)], reward=loud_on_rank_1, **FAR),
        "AdaptiveKL": run([AdaptiveKL(target=1e-3, figure_every=None)], **FAR),
        "AdvantageVanish, weak on rank 0": run([AdvantageVanish(100.0, relative=False)], reward=loud_on_rank_1, **NEAR),
        "AdvantageVanish, weak together": run([AdvantageVanish(700.0, relative=False)], reward=loud_on_rank_1, **NEAR),
        "GradientMonitor, rank 0": run([GradientMonitor(max_nonfinite=5)], cls=Broken),
        "GradientMonitor, rank 1": run([GradientMonitor(max_nonfinite=5)], cls=OtherBroken),
        "OOMGuard": run([OOMGuard()], cls=Hungry),
        "LRBackoff": run([KLEarlyStop(1e-4), LRBackoff(patience=1)], **FAR),
        "LengthCurriculum": run([LengthCurriculum(start=2, iterations=4)], **FAR),
        "PromptMonitor": run([PromptMonitor(min_visits=1, min_prompts=3, z=1.0), PromptRecords(2)], **FAR),
        "EfficiencyStop": run([EfficiencyStop(1, min_improvement=9.0, kl_tolerance=9.0, relative=False)], **FAR),
    }
    memory.peak_memory_share = lambda device: 0.9 if rank == 1 else 0.1
    results["OOMGuard, memory nearly full"] = run([OOMGuard(min_new_tokens=2)])
    return results
