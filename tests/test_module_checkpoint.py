"""The states of rewards in a checkpoint: one for each rank, as each has scored its own responses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.distributed.strategies import DDPStrategy
from lightning_rlhf.rewards import RewardBatch
from tests.ranks import run_ranks
from tests.support import even_digits, fit, same, tiny_module, weights


class AgainstMean:
    """A score less the mean of all scores that this process has given before."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def __call__(self, batch: RewardBatch) -> list[float]:
        scores = even_digits(batch)
        mean = self.total / max(self.count, 1)
        self.total, self.count = self.total + sum(scores), self.count + len(scores)
        return [score - mean for score in scores]

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total, self.count = state["total"], int(state["count"])


def trained(folder: Path, resume: Path | None = None, **trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    module = tiny_module(iterations=4, reward=AgainstMean())
    saves = IterationCheckpoint(folder, every_n_iterations=2, keep=None)
    fit(module, [RNGState(), saves], folder=folder, resume=resume, enable_checkpointing=True, **trainer)
    return weights(module), module.reward.state_dict()["score"]


def on_two(rank: int, folder: Path) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    def two() -> dict[str, Any]:
        return {"devices": 2, "strategy": DDPStrategy(timeout_seconds=60)}

    whole, state = trained(folder / "whole", **two())
    resumed, again = trained(folder / "resumed", folder / "whole" / "iteration_000002.ckpt", **two())
    return same(whole, resumed), state, again


def test_each_rank_gets_the_state_of_its_own_rewards_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (same_0, first, first_again), (same_1, second, second_again) = run_ranks(
        on_two, tmp_path, folder=tmp_path, process_group=False
    )
    assert first["total"] != second["total"], "what is lost where only one is saved"
    assert (first, second) == (first_again, second_again) and same_0 and same_1

    # One process goes on with rank 0's, and says so.
    checkpoint = tmp_path / "whole" / "iteration_000002.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["lightning_rlhf"]["rewards"]
    with caplog.at_level(logging.WARNING):
        assert loaded(saved) == saved[0]["score"]
    [said] = [r.getMessage() for r in caplog.records]
    assert said.startswith("the checkpoint holds the states of the rewards of 2 processes, and this run has 1: ")


def loaded(rewards: Any) -> dict[str, Any]:
    """The state of the reward after a checkpoint with these states was loaded."""
    module = tiny_module(reward=AgainstMean())
    content: dict[str, Any] = {"state_dict": {}}
    module.on_save_checkpoint(content)
    content["lightning_rlhf"]["rewards"] = rewards
    module.on_load_checkpoint(content)
    return module.reward.state_dict()["score"]


@pytest.mark.parametrize("saved", [{"score": {"total": 2.5, "count": 7}}, [{"score": {"total": 2.5, "count": 7}}]])
def test_the_state_of_one_process_and_that_of_an_earlier_release_are_restored(
    saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded(saved) == {"total": 2.5, "count": 7}
    assert not caplog.records
