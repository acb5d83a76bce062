"""Cost of the callbacks: iterations with all of them against iterations with none, in one run.

Every second iteration of one run has no callback, so both sides have the same weights, memory and noise. No callback
has a reason to act: the cost is that of observing, and of the copy of the actor that ``KLGuard`` keeps. The time
spent inside the callbacks, and that of the copy, is also measured directly, which is more precise than the difference
of two noisy times. Figures are drawn every 50 iterations; a fiftieth of one is added.

    python -m benchmarks.callbacks smollm2        # SmolLM2-135M; 8 prompts of 64 tokens, 64 new
    python -m benchmarks.callbacks tiny
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from benchmarks.iteration import SHAPES, FixedPrompts, make
from lightning_rlhf import callbacks as kit
from lightning_rlhf.callbacks.adaptive_kl import draw
from lightning_rlhf.events import EVENTS
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.snapshot import Snapshot

FIGURE_EVERY = 50


def all_callbacks(new_tokens: int) -> list[Callback]:
    """Every shipped callback with limits that are never reached."""
    far = 1e9
    return [
        kit.GradientMonitor(),
        kit.AdvantageVanish(1e-12),
        kit.ClipFractionBreak(0.999, per_minibatch=True),
        kit.KLEarlyStop(far, per_minibatch=True, hard_limit=far, patience=10),
        kit.KLGuard(far, token_limit=far),
        kit.AdaptiveKL(0.05, figure_every=None),
        kit.LRBackoff(),
        kit.OOMGuard(),
        kit.LengthCurriculum(new_tokens, iterations=1),
        kit.EfficiencyStop(window=10_000),
        kit.PromptMonitor(),
        kit.PromptRecords(),
        kit.SamplesTable(),
    ]


class EverySecond(Callback):
    """Switches the other callbacks on and off, and times iterations and the time spent inside the other callbacks."""

    def __init__(self, others: list[Callback]) -> None:
        self.others = others
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.inside: list[float] = []
        self.spent = self.start = 0.0
        for callback in others:
            for event in EVENTS:
                if hasattr(callback, event):
                    setattr(callback, event, self._timed(getattr(callback, event)))

    def _timed(self, handler: Any) -> Any:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            handler(*args)
            self.spent += time.perf_counter() - start

        return timed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.on = batch_idx % 2 == 0
        trainer.callbacks = [self, *self.others] if self.on else [self]
        self.spent, self.start = 0.0, time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2:  # the first of each kind warms up
            self.times[self.on].append(time.perf_counter() - self.start)
            if self.on:
                self.inside.append(self.spent)


def figure_seconds() -> float:
    """Seconds for one figure of a long run, drawn a second time so that the import of matplotlib is not counted."""
    history = [[float(i), 0.05, 0.1] for i in range(1, 1001)]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            start = time.perf_counter()
            draw(history, 0.05, Path(folder) / "adaptive_kl.png")
    return time.perf_counter() - start


def copy_seconds(module: PPOModule) -> float:
    """Seconds for the copy of the actor, written over that of the previous iteration."""
    optimizer = module.optimizers()
    kept, times = Snapshot.of("actor", optimizer), []
    for _ in range(5):
        start = time.perf_counter()
        Snapshot.of("actor", optimizer, over=kept)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=6, help="iterations of each kind")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shape, iterations = SHAPES[arguments.workload], 2 * arguments.repeats + 2
    module = make(arguments.workload, shape, iterations, critic="separate", micro_batch_tokens=8192)
    watch = EverySecond(all_callbacks(shape.new_tokens))
    data = FixedPrompts(shape, module.actor.lm.config.vocab_size, iterations)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[watch, *watch.others],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    on, off = (statistics.median(watch.times[kind]) for kind in (True, False))
    inside, figure, copy = statistics.median(watch.inside), figure_seconds() / FIGURE_EVERY, copy_seconds(module)
    print(f"{arguments.workload}: iteration {on:.3f} s with all callbacks, {off:.3f} s with none, ratio {on / off:.4f}")
    print(
        f"  inside the callbacks {1000 * inside:.2f} ms, pictures {1000 * figure:.2f} ms, copy of the actor "
        f"{1000 * copy:.2f} ms per iteration: {(inside + figure + copy) / off:.3%} of an iteration"
    )


if __name__ == "__main__":
    main()
