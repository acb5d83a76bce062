"""A group of prompts with a noisy reward beside one with a clean reward: does the policy learn the clean one?

A small random model answers 256 additions. Half of them are "easy": the score is the share of even digits, between 0
and 1. The other half are "hard": the score is normal noise of standard deviation 10, whatever the answer. With one
z-score for all the noise takes nearly all of the deviation, and the easy scores hardly differ.

    python -m benchmarks.noisy_group                               # everything
    python -m benchmarks.noisy_group --normalise rewards --seeds 1
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import Trainer

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.models import build_policy, build_tiny
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward, RewardBatch
from lightning_rlhf.rollout import HFEngine

CHOICES = ("none", "rewards", "advantages")
NOISE = 10.0
LAST = 5
"""Iterations at the end, whose mean counts."""


@dataclass
class Curves(RLHFCallback):
    """Metrics of every iteration."""

    rewards: list[float] = field(default_factory=list)
    """Mean score of the easy prompts."""
    signals: list[tuple[float, float]] = field(default_factory=list)
    """Mean |advantage| of easy and hard prompts."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rewards.append(numbers["group/easy/reward_mean"])
        self.signals.append((numbers["group/easy/advantage_abs_mean"], numbers["group/hard/advantage_abs_mean"]))

    @property
    def reached(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])


def noisy(seed: int) -> Callable[[RewardBatch], list[float]]:
    """The share of even digits; for hard prompts, noise."""
    draws = random.Random(seed)

    def score(batch: RewardBatch) -> list[float]:
        clean = [sum(c in "02468" for c in text) / max(len(text), 1) for text in batch.responses]
        levels = [row["level"] for row in batch.rows]
        return [draws.gauss(0.0, NOISE) if level == "hard" else x for x, level in zip(clean, levels, strict=True)]

    return score


def train(normalise: str, seed: int, iterations: int) -> Curves:
    """One run; ``normalise`` is ``module.groups.normalise``."""
    torch.set_num_threads(1)
    loaded = build_tiny("0123456789+-*= ", hidden_size=32, layers=2, heads=2, max_positions=64, seed=0)
    module = PPOModule(
        build_policy(loaded, critic="separate"),
        HFEngine(samples=2, max_new_tokens=6),
        CompositeReward({"score": {"reward": noisy(seed)}}),
        iterations=iterations,
        seed=seed,
        groups={"normalise": normalise},
        update={"minibatch_size": 64},
        kl={"coefficient": 0.0},
        actor={"lr": 3e-3, "warmup_iterations": 0},
        critic={"lr": 1e-3},
    )
    sums = [(a, b) for a in range(16) for b in range(16)]
    rows = [{"prompt": f"{a}+{b}=", "level": "easy" if (a + b) % 2 else "hard"} for a, b in sums]
    sizes: dict[str, Any] = {"prompts_per_iteration": 64, "iterations": iterations, "seed": seed}
    data = PromptDataModule(rows, tokenizer=loaded.tokenizer, group_column="level", **sizes)
    curves = Curves()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curves],
    )
    trainer.fit(module, datamodule=data)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--normalise", nargs="+", default=CHOICES, choices=CHOICES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    print("| normalise | seed | easy reward, first iteration | last five | mean abs. advantage, easy / hard, first |")
    print("| --- | --- | --- | --- | --- |")
    for normalise in options.normalise:
        for seed in options.seeds:
            curves = train(normalise, seed, options.iterations)
            easy, hard = curves.signals[0]
            cells = (f"{curves.rewards[0]:.3f}", f"{curves.reached:.3f}", f"{easy:.2f} / {hard:.2f}")
            print(f"| {normalise} | {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
