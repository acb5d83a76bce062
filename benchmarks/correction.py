"""Cost of rollout correction relative to the update it belongs to.

Three things are timed on tensors of the given shape: weights and rejection, the cheap metrics, the full metrics. With
``tensors`` they are printed in milliseconds; with ``update`` a whole PPO update (every epoch: forward and backward
passes, optimiser steps) is timed on the same shape in the same process, and each cost is printed as its percentage.

    python -m benchmarks.correction tensors                # 256 x 4096
    python -m benchmarks.correction update                 # SmolLM2-135M, 32 sequences of 64 + 64 tokens
    python -m benchmarks.correction update --model tiny    # the same with a tiny model: a cheap check of the script
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from benchmarks.iteration import FixedPrompts, Shape, even_ids, load
from lightning_rlhf.functional.correction import Plan, correct
from lightning_rlhf.functional.rejection import parse_rules
from lightning_rlhf.metrics.correction import CorrectionMetrics
from lightning_rlhf.models import build_policy
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward
from lightning_rlhf.rollout import HFEngine

PLAN = Plan(level="token", cap=2.0, rules=parse_rules("token,geometric", "2.0,1.01"), veto=1e-4)
"""A configuration with more work than any preset."""


def sample(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of trainer and engine that differ as in bfloat16, and lengths from half to all columns."""
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(rows, columns, generator=generator)
    train = rollout + 0.02 * torch.randn(rows, columns, generator=generator)
    lengths = torch.randint(columns // 2, columns + 1, (rows, 1), generator=generator)
    return train, rollout, torch.arange(columns) < lengths


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def costs(rows: int, columns: int, repeats: int) -> dict[str, float]:
    """Median seconds of each part."""
    train, rollout, mask = sample(rows, columns)
    found = correct(train, rollout, mask, PLAN)

    def measure(full: bool) -> None:
        metrics = CorrectionMetrics(full=full)
        metrics.update(found, train, rollout)
        metrics.compute()

    return {
        "weights and rejection": median_seconds(lambda: correct(train, rollout, mask, PLAN), repeats),
        "cheap metrics": median_seconds(lambda: measure(False), repeats),
        "full metrics": median_seconds(lambda: measure(True), repeats),
    }


class UpdateTimes(Callback):
    """Seconds of each update, as the module measures them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self.seconds.append(float(trainer.callback_metrics["time/update"]))


def update_seconds(model: str, rows: int, columns: int, iterations: int) -> float:
    """Median seconds of an update of two epochs of two minibatches, the first iteration left out."""
    shape = Shape(prompts=rows, prompt_tokens=64, new_tokens=columns, epochs=2, minibatches=2)
    loaded = load(model)
    module = PPOModule(
        build_policy(loaded, critic="shared"),
        HFEngine(max_new_tokens=columns, ignore_eos=True),
        CompositeReward({"even": {"reward": even_ids}}),
        iterations=iterations,
        update={"epochs": shape.epochs, "minibatch_size": rows // shape.minibatches, "micro_batch_tokens": 2048},
    )
    times = UpdateTimes()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=FixedPrompts(shape, module.actor.lm.config.vocab_size, iterations))
    return statistics.median(times.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tensors", "update"])
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="smollm2")
    parser.add_argument("--rows", type=int, help="sequences; default 256 for tensors, 32 for update")
    parser.add_argument("--columns", type=int, help="response tokens; default 4096 for tensors, 64 for update")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=4, help="updates timed, the first one left out of the median")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows, columns = (256, 4096) if arguments.what == "tensors" else (32, 64)
    rows, columns = arguments.rows or rows, arguments.columns or columns
    found = costs(rows, columns, arguments.repeats)
    if arguments.what == "tensors":
        for name, seconds in found.items():
            print(f"{rows} x {columns}, {name}: {1000 * seconds:.2f} ms")
        return
    update = update_seconds(arguments.model, rows, columns, iterations=arguments.iterations)
    print(f"{arguments.model}: update of {rows} sequences of 64 + {columns} tokens: {update:.3f} s")
    for name, seconds in found.items():
        print(f"{name}: {1000 * seconds:.2f} ms, {100 * seconds / update:.3f} % of the update")


if __name__ == "__main__":
    main()
