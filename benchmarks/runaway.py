"""A run that collapses, with and without the stability callbacks.

``experiment=runaway`` is the quickstart's task with hostile settings. Each seed is run with ``callbacks=none`` and with
``callbacks=stability``; the mean score of every iteration is written to a csv file and a figure.

    python benchmarks/runaway.py                          # three seeds, both groups; some minutes on two cores
    python benchmarks/runaway.py --seeds 1 --iterations 10 --callbacks stability

A run's start is its mean score before any update, its end is the mean over the last five iterations.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hydra
from lightning import Callback
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("callbacks", "seed", "iteration", "reward", "kl_ref", "epochs_used", "lr_scale")
LAST = 5


class Curve(Callback):
    """Collects one row of metrics per iteration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.rows.append(
            {
                "iteration": float(metrics["clock/iteration"]),
                "reward": float(metrics["reward/mean"]),
                "kl_ref": float(metrics.get("kl/ref", math.nan)),
                "epochs_used": float(metrics["ppo/epochs_used"]),
                "lr_scale": float(metrics["knob/lr_scale"]),
            }
        )


def run(group: str, seed: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The curve of one run."""
    with tempfile.TemporaryDirectory() as folder:
        with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
            chosen = ["experiment=runaway", f"callbacks={group}", f"seed={seed}", f"output_dir={folder}", *overrides]
            chosen += ["logger=none", "trainer.enable_progress_bar=false", "progress_every=null"]
            config = schema.check(hydra.compose("train", overrides=chosen))
        parts, trainer, curve = assemble(config), make_trainer(config), Curve()
        trainer.callbacks.append(curve)  # type: ignore[attr-defined]
        trainer.fit(parts.module, datamodule=parts.datamodule)
    return [{"callbacks": group, "seed": seed, **row} for row in curve.rows]


def ends(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Score at the start and at the end of one run."""
    rewards = [row["reward"] for row in rows]
    return rewards[0], statistics.mean(rewards[-LAST:])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Scores and KL of every run over its iterations."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    colours = {"none": "tab:red", "stability": "tab:blue"}
    for group, seed in dict.fromkeys((row["callbacks"], row["seed"]) for row in rows):
        own = [row for row in rows if (row["callbacks"], row["seed"]) == (group, seed)]
        label = f"callbacks={group}" if seed == own[0]["seed"] == min(r["seed"] for r in rows) else None
        for axes, name in ((upper, "reward"), (lower, "kl_ref")):
            axes.plot([row["iteration"] for row in own], [row[name] for row in own], color=colours[group], label=label)
    upper.set_ylabel("reward/mean")
    upper.legend()
    lower.set_ylabel("kl/ref, nats per token")
    lower.set_yscale("symlog", linthresh=0.1)
    lower.set_xlabel("iteration")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--callbacks", nargs="+", choices=["none", "stability"], default=["none", "stability"])
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="folder of runaway.csv and runaway.png")
    parser.add_argument("--override", nargs="*", default=[], help="further overrides of the configuration")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    overrides = [f"threads={arguments.threads}", *arguments.override]
    overrides += [f"iterations={arguments.iterations}"] if arguments.iterations else []
    rows: list[dict[str, Any]] = []
    for group in arguments.callbacks:
        for seed in arguments.seeds:
            own = run(group, seed, overrides)
            rows += own
            start, end = ends(own)
            verdict = "holds" if end >= start else "collapses"
            print(f"callbacks={group} seed={seed}: reward {start:.3f} -> {end:.3f}, {verdict}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "runaway.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.out / "runaway.png")


if __name__ == "__main__":
    main()
