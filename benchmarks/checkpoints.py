"""How long training waits for checkpoints: written in the background against written first, in one run.

Every iteration is saved, in turn in the background, with training waiting for the file, and not at all, so all three
have the same weights, disk and noise. Waiting is all time inside the checkpoint callback: the check of the weights, the
references to the state, the file or the wait for its copy and for the file before. A write in the background also
takes processor time from the iteration beside it: the iterations themselves are compared, too.

    python -m benchmarks.checkpoints smollm2        # SmolLM2-135M; 8 prompts of 64 tokens, 64 new
    python -m benchmarks.checkpoints smollm2 --probe 2
    python -m benchmarks.checkpoints tiny
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from benchmarks.iteration import SHAPES, FixedPrompts, make
from lightning_rlhf.checkpoint import IterationCheckpoint

KINDS = ("background", "waiting", "none")
HOOKS = ("on_train_batch_start", "on_rollout_end", "on_experience_ready", "on_train_batch_end")


class InTurn(IterationCheckpoint):
    """Saves in another way after each iteration, and times itself; hooks before the next save count for the last."""

    def __init__(self, folder: str, probe: int | None) -> None:
        super().__init__(folder, 1, keep=2, probe=probe)
        self.waited: dict[str, list[float]] = defaultdict(list)
        self.iterations: dict[str, list[float]] = defaultdict(list)
        self.writes: list[float] = []
        self._kind, self._spent, self._begun = "none", 0.0, 0.0
        for hook in HOOKS:
            setattr(self, hook, self._timed(getattr(super(), hook), hook))

    def _timed(self, handler: Any, hook: str) -> Any:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            if hook == "on_train_batch_end":
                self._settle(args[0])  # the wait for a file counts for its own save, not for the next one
                self._spent += time.perf_counter() - start
                start = time.perf_counter()
                self._next(start)
            handler(*args)
            self._spent += time.perf_counter() - start

        return timed

    def _next(self, now: float) -> None:
        """One period ends: the save after the last iteration, and the iteration beside it."""
        if self.iteration >= len(KINDS):  # the first of each kind warms up
            self.waited[self._kind].append(self._spent)
            self.iterations[self._kind].append(now - self._begun)
            print(f"  {self._kind}: {self._spent:.3f} s of {now - self._begun:.2f} s", flush=True)
        self._kind, self._spent, self._begun = KINDS[self.iteration % len(KINDS)], 0.0, now
        self._saving.asynchronous = self._kind == "background"

    def save(self, trainer: Trainer) -> None:
        if self._kind != "none":
            super().save(trainer)
            return
        self._settle(trainer)
        self._saved = self.iteration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=4, help="saves of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe", type=int, default=None, help="prompts that are answered for each save")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message="checkpoints are written while training waits")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shape, iterations = SHAPES[arguments.workload], len(KINDS) * (arguments.repeats + 1) + 1
    module = make(arguments.workload, shape, iterations, critic="separate", micro_batch_tokens=8192)
    data = FixedPrompts(shape, module.actor.lm.config.vocab_size, iterations)
    with tempfile.TemporaryDirectory() as folder:
        saver = InTurn(folder, arguments.probe)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[saver],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
        size = Path(saver.last_model_path).stat().st_size
    plain = statistics.median(saver.iterations["none"]) - statistics.median(saver.waited["none"])
    print(f"{arguments.workload}: checkpoint of {size / 2**30:.2f} GiB, iteration without one {plain:.2f} s")
    for kind in KINDS:
        waited, beside = statistics.median(saver.waited[kind]), statistics.median(saver.iterations[kind])
        share = f"{waited / plain:.2%} of an iteration"
        print(f"  {kind:10}: training waits {waited:.3f} s a save, {share}; iterations beside it {beside:.2f} s")
    ratio = statistics.median(saver.waited["waiting"]) / statistics.median(saver.waited["background"])
    print(f"  waiting for the file / in the background: {ratio:.0f}")


if __name__ == "__main__":
    main()
