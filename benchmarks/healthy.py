"""Effect of the callback groups on healthy runs: the held-out score of each group beside that of ``none``.

Six runs: the quickstart (its critic is on the actor's trunk), a separate critic, GRPO, LoRA, another task, SmolLM2;
each with ``callbacks=none``, ``default``, ``stability`` and ``paranoid``. A cell is one run with one group and one
seed. Cells run one after the other; each is written to the csv file when it ends, and cells in the file are skipped.

    python benchmarks/healthy.py --out healthy.csv                       # everything; hours on two cores
    python benchmarks/healthy.py --out healthy.csv --runs grpo --seeds 1 --groups none stability
    python benchmarks/healthy.py --out healthy.csv --table               # the table of docs/callbacks.md, no run

The score is the mean reward of the greedy answers to the held-out prompts after training.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import hydra

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer

COLUMNS = (
    *("run", "callbacks", "seed", "iterations", "before", "score", "share_right", "kl_ref", "reward"),
    *("beta", "lr_scale", "epochs_stopped", "steps_skipped", "rollbacks", "kl_brakes", "seconds"),
)
GROUPS = ("none", "default", "stability", "paranoid")
LARGER = "model.lr.actor=5e-4"
"""A rate that gives brakes more to do than the quickstart's own."""
SMALL = ("warmup=half_right", LARGER, "iterations=40", "data.prompts_per_iteration=256")
"""The quickstart's model and task with fewer prompts and a shorter warm-up; each run below changes one thing."""
RUNS: dict[str, tuple[str, ...]] = {
    "quickstart": ("iterations=80", LARGER),
    "grpo": (
        *(*SMALL, "module.advantage.estimator=grpo", "model.policy.critic=none"),
        *("rollout.samples=8", "data.prompts_per_iteration=32"),
    ),
    "lora": (*SMALL, "model.policy.lora={r: 16, alpha: 32, target_modules: all-linear}", "module.actor.lr=4e-3"),
    "separate critic": (*SMALL, "model.policy.critic=separate"),
    "subtraction": (*SMALL, "data.train.operations='-'"),
    "smollm2": (
        *("experiment=smollm2_arithmetic", "trainer=default", "callbacks.adaptive_kl=null", "iterations=6"),
        *("data.prompts_per_iteration=32", "module.update.minibatch_size=16", "data.validation.size=100"),
    ),
}
"""Overrides of each run."""


def run(name: str, group: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One cell of the grid."""
    with tempfile.TemporaryDirectory() as folder:
        with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
            chosen = [*RUNS[name], f"callbacks={group}", f"seed={seed}", f"output_dir={folder}", *overrides]
            chosen += ["logger=none", "trainer.enable_progress_bar=false", "progress_every=null"]
            config = schema.check(hydra.compose("train", overrides=chosen))
        start = time.perf_counter()
        parts, trainer = assemble(config), make_trainer(config)
        with closing(parts.module.engine):
            [before] = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
            trainer.fit(parts.module, datamodule=parts.datamodule)
            last = {key: float(value) for key, value in trainer.callback_metrics.items()}
            [after] = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    control = parts.module.control
    right = next(iter(parts.module.reward.terms))
    return {
        **{"run": name, "callbacks": group, "seed": seed, "iterations": control.iteration},
        **{"before": before["eval/reward_mean"], "score": after["eval/reward_mean"]},
        **{"share_right": after[f"eval/{right}"], "kl_ref": last.get("kl/ref"), "reward": last["reward/mean"]},
        **{"beta": last["kl/coefficient"], "lr_scale": last["knob/lr_scale"]},
        **{key: int(last[f"stability/{key}"]) for key in COLUMNS if f"stability/{key}" in last},
        "seconds": round(time.perf_counter() - start),
    }


def read(path: Path) -> list[dict[str, str]]:
    """The finished cells."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict[str, Any]) -> None:
    """Append one cell to the csv file."""
    fresh = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def table(rows: list[dict[str, str]]) -> str:
    """Held-out scores as Markdown: mean over the seeds, and the share of the score of ``none`` on the same seeds."""
    scores = {(row["run"], row["callbacks"], row["seed"]): float(row["score"]) for row in rows}
    lines = ["| run | " + " | ".join(f"`{group}`" for group in GROUPS) + " |", "| --- " * (1 + len(GROUPS)) + "|"]
    for name in dict.fromkeys(row["run"] for row in rows):
        row = []
        for group in GROUPS:
            seeds = [s for n, g, s in scores if (n, g) == (name, group) and (name, "none", s) in scores]
            own, base = (
                statistics.mean([scores[name, g, s] for s in seeds] or [float("nan")]) for g in (group, "none")
            )
            row.append(f"{own:.3f} ({own / base:.1%}; {len(seeds)})" if seeds else "")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="csv file of the cells; those in it are skipped")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["none", "stability", "default", "paranoid"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--override", nargs="*", default=[], help="further overrides, such as other sizes")
    parser.add_argument("--table", action="store_true", help="print the table of docs/callbacks.md, no run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cells = itertools.product(arguments.seeds, arguments.groups, arguments.runs)
    for seed, group, name in () if arguments.table else cells:
        if any((r["run"], r["callbacks"], r["seed"]) == (name, group, str(seed)) for r in read(arguments.out)):
            continue
        row = run(name, group, seed, [f"threads={arguments.threads}", *arguments.override])
        append(arguments.out, row)
        print(f"{name}, callbacks={group}, seed {seed}: {row['before']:.3f} -> {row['score']:.3f}", flush=True)
    print(table(read(arguments.out)))


if __name__ == "__main__":
    main()
