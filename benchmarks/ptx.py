"""What a policy forgets during PPO, with and without the language-model loss of PPO-ptx.

A small Llama with one token per character learns Python's language reference, which every Python ships
(``pydoc_data.topics``). Then PPO trains it to write vowels after ``12+34=``, a prompt that the reference does not have:
once without PPO-ptx (``none``), once with it at its default coefficient (``fixed``), once with ``AdaptivePTX`` on top
(``adaptive``); everything else is the same. The perplexity is that of topics that neither the first training, nor
PPO-ptx, nor the callback's probes have read.

    python benchmarks/ptx.py                                   # three seeds; about half an hour on one core
    python benchmarks/ptx.py --seeds 1 --iterations 10         # a first look

A run's reward is the mean over its last five iterations.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import math
import statistics
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from lightning_rlhf.callbacks import AdaptivePTX
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.corpus import text_blocks
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.models import LoadedModel, build_policy, build_tiny
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward, RewardBatch
from lightning_rlhf.rollout import HFEngine

LENGTH = 128
LAST = 5
EVERY = 5
"""Iterations between two measurements of the perplexity."""
ARMS = ("none", "fixed", "adaptive")
COLUMNS = ("arm", "seed", "iteration", "reward", "kl_ref", "coefficient", "ptx_loss", "capability", "perplexity")


def documents() -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    """The topics to learn from, every tenth for the perplexity alone, and the characters of all."""
    texts = ["".join(c for c in topics[name] if c.isascii()) for name in sorted(topics)]
    rows = [{"text": text} for text in texts]
    held_out = rows[::10]
    return [row for i, row in enumerate(rows) if i % 10], held_out, "".join(sorted(set("".join(texts)) | set("+-*=")))


def vowels(batch: RewardBatch) -> list[float]:
    """Share of the response's characters that are vowels; an empty response has none."""
    return [sum(c in "aeiou" for c in text.lower()) / max(len(text), 1) for text in batch.responses]


def learned(rows: list[dict[str, str]], characters: str, steps: int, seed: int) -> LoadedModel:
    """A model of the text: ``steps`` steps of 32 blocks, learning rate 2e-3 down to 0 on a cosine."""
    loaded = build_tiny(characters, hidden_size=96, layers=3, heads=3, max_positions=2 * LENGTH, seed=seed)
    blocks = text_blocks(rows, loaded.tokenizer, text_field="text", length=LENGTH, key="text").long()
    optimizer = torch.optim.AdamW(loaded.lm.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        ids = blocks[torch.randint(len(blocks), (32,), generator=generator)]
        loss: Any = loaded.lm(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loaded


@torch.no_grad()
def perplexity(lm: Any, blocks: Tensor) -> float:
    """exp(mean loss per token)."""
    losses = [lm(input_ids=part, labels=part).loss for part in blocks.split(32) if len(part) == 32]
    return float(torch.stack(losses).mean().exp())


class Curve(Callback):
    """One row per iteration."""

    def __init__(self, held_out: Tensor) -> None:
        self.held_out = held_out
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics
        names = {"reward": "reward/mean", "kl_ref": "kl/ref", "coefficient": "ptx/coefficient"}
        names |= {"ptx_loss": "ptx/loss", "capability": "ptx/capability"}
        row = {column: float(metrics.get(name, math.nan)) for column, name in names.items()}
        last = int(metrics["clock/iteration"]) == module.iterations
        due = last or int(metrics["clock/iteration"]) % EVERY == 0
        found = perplexity(module.actor.lm, self.held_out) if due else math.nan
        self.rows.append({"iteration": float(metrics["clock/iteration"]), "perplexity": found} | row)


def run(
    loaded: LoadedModel, rows: list[dict[str, str]], held_out: Tensor, arm: str, seed: int, options: Any
) -> list[dict[str, Any]]:
    """The curve of one PPO run."""
    ptx = {"source": rows, "length": LENGTH, "tokens_per_step": 16 * LENGTH, "coefficient": options.coefficient}
    module = PPOModule(
        build_policy(LoadedModel(copy.deepcopy(loaded.lm), loaded.tokenizer, loaded.source), critic="separate"),
        HFEngine(samples=1, max_new_tokens=16),
        CompositeReward({"vowels": {"reward": vowels}}),
        iterations=options.iterations,
        seed=seed,
        actor={"lr": options.lr, "warmup_iterations": 2},
        critic={"lr": 1e-3},
        kl={"coefficient": options.kl},
        ptx=None if arm == "none" else ptx,
    )
    curve = Curve(held_out)
    steers = [AdaptivePTX()] if arm == "adaptive" else []
    data = PromptDataModule(
        ArithmeticTask(max_value=49), None, tokenizer=loaded.tokenizer, prompts_per_iteration=64,
        iterations=options.iterations, seed=seed,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*steers, curve],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return [{"arm": arm, "seed": seed, **row} for row in curve.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--steps", type=int, default=400, help="of the first training")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the actor in PPO")
    parser.add_argument("--kl", type=float, default=0.02, help="weight of the KL to the first policy")
    parser.add_argument("--coefficient", type=float, default=0.05, help="of PPO-ptx, at the start")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="csv file of all curves")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    rows, apart, characters = documents()
    curves: list[dict[str, Any]] = []
    for seed in options.seeds:
        start = time.perf_counter()
        loaded = learned(rows, characters, options.steps, seed)
        held_out = text_blocks(apart, loaded.tokenizer, text_field="text", length=LENGTH, key="text").long()
        held_out = held_out[:128]
        before = perplexity(loaded.lm, held_out)
        print(f"seed {seed}: perplexity {before:.3f} after {time.perf_counter() - start:.0f} s", flush=True)
        rewards: dict[str, float] = {}
        for arm in options.arms:
            own = run(loaded, rows, held_out, arm, seed, options)
            curves += own
            rewards[arm] = statistics.mean(row["reward"] for row in own[-LAST:])
            rise = own[-1]["perplexity"] / before - 1
            share = rewards[arm] / rewards.get("none", math.nan)
            print(
                f"  {arm:<8}: reward {own[0]['reward']:.3f} -> {rewards[arm]:.3f} ({share:.0%} of that without), "
                f"perplexity {before:.3f} -> {own[-1]['perplexity']:.3f} ({rise:+.1%}), "
                f"gamma {own[-1]['coefficient']:.3g}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(curves)


if __name__ == "__main__":
    main()
