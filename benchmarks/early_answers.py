"""A learned habit of answering nothing, with and without a penalty for early ends: three figures of docs/concepts.md.

The quickstart's random model learns on two-digit sums to write, three times out of four, a single ``=`` and the end
token in place of the answer. The reward then only punishes wrong numbers (0 for a right one and for none, -1 for a
wrong one), as one for harmlessness does, so that saying nothing is safe. PPO runs once without a penalty and once with
``module.termination.early=penalty``.

    python benchmarks/early_answers.py            # under a minute on one core

The figures are ``response/early_fraction`` of the samples: before any update, and in the last iteration of each run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import hydra
from lightning import Callback

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.experience import Finish

CLAIM = "lightning_rlhf.rewards.RegexMatch"
OVERRIDES = (
    *("model=tiny", "data=jsonl", "reward=exact_match", "callbacks=none", "logger=none", "iterations=10"),
    *("data.prompts_per_iteration=96", "module.update.minibatch_size=48", "data.validation_limit=1"),
    *("warmup=sft", "warmup.steps=300", "warmup.lr=2e-3", "warmup.answer_field={answer: 0.25, silent: 0.75}"),
    # An answer that matches earns 1, and every number costs 1: only a wrong number loses anything.
    f"+reward.terms.claim={{weight: -1.0, reward: {{_target_: {CLAIM}, pattern: '[0-9]', mode: search}}}}",
    *("module.termination.min_tokens=2", "module.kl.coefficient=0", "trainer.enable_progress_bar=false"),
    *("progress_every=null", "module.loss.entropy_coefficient=0"),
)


class EarlyShare(RLHFCallback):
    """The share of early responses in the samples of each iteration."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
        self.shares.append((experience.finish == Finish.EARLY).float().mean().item())


def run(early: str, folder: Path) -> list[float]:
    """Train with this choice of ``module.termination.early``; the share of early responses in each iteration."""
    rows = [row | {"silent": "="} for row in ArithmeticTask(min_value=10, max_value=39)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps({k: v for k, v in row.items() if k[0] != "_"}) + "\n" for row in rows))
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        own = [f"data.train.path={data}", f"output_dir={folder}", f"module.termination.early={early}"]
        config = schema.check(hydra.compose("train", overrides=[*OVERRIDES, *own]))
    parts, trainer, watch = assemble(config), make_trainer(config), EarlyShare()
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(watch)
    with closing(parts.module.engine):
        trainer.fit(parts.module, datamodule=parts.datamodule)
    return watch.shares


def figures() -> dict[str, float]:
    """The three figures; both runs start from the same weights and draw the same first samples."""
    with tempfile.TemporaryDirectory() as folder:
        kept, penalised = (run(early, Path(folder)) for early in ("keep", "penalty"))
    if not math.isclose(kept[0], penalised[0]):
        raise RuntimeError(f"the first samples differ: {kept[0]} and {penalised[0]} of them are early")
    return {"before": kept[0], "after with penalty": penalised[-1], "after without": kept[-1]}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name, share in figures().items():
        print(f"{name:<20} {share:.3f}")
