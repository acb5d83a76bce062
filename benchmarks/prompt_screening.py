"""How well does ``lightning-rlhf prompts RUN --screen`` tell the prompts with a high KL?

Two runs, three seeds of each:

* ``planted``: 160 problems, 24 of them products. The reward pays for the digit 7 in the answers to products and takes
  away for it elsewhere, so a habit grows on one kind of prompt; 32 iterations of an untrained tiny model.
* ``quickstart``: ``lightning-rlhf train``, where no kind of prompt is planted.

Of each: the held-out AUC of all features, of the three plain ones alone, and the mean of ten with shuffled labels.

    python -m benchmarks.prompt_screening                                # everything
    python -m benchmarks.prompt_screening --runs planted --seeds 1       # one run
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlhf import cli
from lightning_rlhf.prompts.screening import features, held_out_auc, high_kl
from lightning_rlhf.prompts.vectors import RunPolicy
from lightning_rlhf.reporting.prompt_table import recorded_prompts
from lightning_rlhf.rewards import RewardBatch

PROMPTS, PRODUCTS = 160, 24
RECORDED = ("logger=none", "trainer.enable_progress_bar=false", "callbacks=[default,prompt_records]", "threads=1")
RUNS: dict[str, tuple[str, ...]] = {
    "planted": (
        *("warmup=none", "iterations=32", "data=jsonl", "data.prompts_per_iteration=160", "rollout.max_new_tokens=4"),
        *("model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "model.lr.actor=5e-3"),
        *("module.kl.coefficient=0", "module.update.minibatch_size=80", "~reward"),
        "+reward={_target_: lightning_rlhf.rewards.CompositeReward, terms: "
        "{sevens: {reward: {_target_: benchmarks.prompt_screening.sevens}}}}",
    ),
    "quickstart": (),
}
"""Overrides by name."""


def sevens(batch: RewardBatch) -> list[float]:
    """The number of sevens on products, its negative elsewhere."""
    pays = (1.0 if "*" in row["prompt"] else -1.0 for row in batch.rows)
    return [sign * text.count("7") for sign, text in zip(pays, batch.responses, strict=True)]


def write_problems(path: Path, seed: int) -> None:
    """Different problems as JSONL, the first of them products, the others sums."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < PROMPTS:
        found[f"{draw.randrange(100)}{'*' if len(found) < PRODUCTS else '+'}{draw.randrange(100)}="] = None
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in found), encoding="utf-8")


def cell(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    data = folder / "rows.jsonl"
    write_problems(data, seed)
    words = [*RECORDED, *RUNS[name], f"seed={seed}", f"hydra.run.dir={folder / 'run'}"]
    if cli.main(["train", *words, *([f"data.train.path={data}"] if name == "planted" else [])]):
        raise SystemExit(f"{name}, seed {seed}: the run has failed")
    prompts, policy = recorded_prompts(folder / "run"), RunPolicy.of(folder / "run")
    high, limit = high_kl(prompts)
    began = time.perf_counter()
    measured = policy.measure(policy.ids_of(prompts))
    seconds = time.perf_counter() - began
    rows = features(measured.states.numpy(), measured, [prompt.text for prompt in prompts])
    draw = np.random.default_rng(seed)
    found = held_out_auc(rows, high)
    return {
        **{"run": name, "seed": seed, "prompts": len(prompts), "high": int(high.sum()), "above": f"{limit:.3g}"},
        **{"auc": f"{found.auc:.2f}", "chance below": f"{found.chance:.2f}"},
        "plain": f"{held_out_auc(rows[:, -3:], high).auc:.2f}",
        "shuffled": f"{np.mean([held_out_auc(rows, draw.permutation(high)).auc for _ in range(10)]):.2f}",
        "seconds": f"{seconds:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    asked = parser.parse_args()
    for name in asked.runs:
        for seed in asked.seeds:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(cell(name, seed, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
