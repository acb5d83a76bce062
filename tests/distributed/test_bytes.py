"""Bytes sent between the processes of a DDP run in one iteration; docs/distributed.md uses these numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.distributed.strategies import DDPStrategy
from tests.ranks import run_ranks
from tests.support import fit, prompts, tiny_module

SLOT_BYTES = 40
"""Limit of the bytes per token column, padding included, all fields together."""
STATISTICS_BYTES = 2048
"""Limit of the bytes of all reductions in an iteration of four minibatches."""


class Traffic(RLHFCallback):
    """Bytes that this rank sends, by kind, in the second iteration."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = dict.fromkeys(("gradients", "rows", "statistics", "objects"), 0)
        self.slots = self.steps = 0
        self.counting = False

    def count(self, kind: str, size: int) -> None:
        if self.counting:
            self.sent[kind] += size

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def hook(state: Any, bucket: Any) -> Any:
            self.count("gradients", bucket.buffer().nbytes)
            counting, self.counting = self.counting, False
            sending = allreduce_hook(state, bucket)  # by all_reduce, which is counted as statistics otherwise
            self.counting = counting
            return sending

        # DDP compares types, and here annotations are strings.
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        trainer.strategy.model.register_comm_hook(None, hook)
        reduce, gather = dist.all_reduce, dist.all_gather

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count("statistics", tensor.nbytes)
            return reduce(tensor, *args, **kwargs)

        def all_gather(parts: list, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Lists of texts and keys come as bytes, with their lengths before them.
            self.count("objects" if tensor.dtype == torch.uint8 and tensor.ndim == 1 else "rows", tensor.nbytes)
            return gather(parts, tensor, *args, **kwargs)

        both: Any = dist
        both.all_reduce, both.all_gather = all_reduce, all_gather
        both.distributed_c10d.all_gather = all_gather  # which all_gather_object calls

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.counting = index == 1

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
        if self.counting:
            self.slots = len(experience) * (experience.prompt_ids.shape[1] + experience.response_ids.shape[1])

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if self.counting:
            self.steps, self.counting = stats.steps, False


def traffic(rank: int, world: int) -> dict[str, Any]:
    module = tiny_module(iterations=2, samples=1, update={"epochs": 2, "minibatch_size": 8})
    seen = Traffic()
    fit(module, [seen], data=prompts(module, per_iteration=16), strategy=DDPStrategy(), devices=world)
    weights = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return {"weights": weights, "slots": seen.slots, "steps": seen.steps, **seen.sent}


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_once_per_step_and_little_else(tmp_path: Path, world: int) -> None:
    ranks = run_ranks(traffic, world, folder=tmp_path, world_size=world)
    for sent in ranks:
        assert sent["steps"] == 4
        assert sent["gradients"] == sent["steps"] * sent["weights"], "each gradient once, in its own precision"
        assert 0 < sent["rows"] <= SLOT_BYTES * max(each["slots"] for each in ranks)
        assert 0 < sent["statistics"] <= STATISTICS_BYTES, "the same for a model of any size"
        assert sent["statistics"] == ranks[0]["statistics"]
        assert 0 < sent["objects"] <= 4096, "keys and texts of at most eight rows"
