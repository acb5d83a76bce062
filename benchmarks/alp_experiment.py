"""Does noise on the hidden states narrow the ratio between trainer and engine, and at what cost in reward?

Every combination of engine, arm and seed is one ``lightning-rlhf train`` in its own process; a run whose folder is
complete is not repeated. Arms: ``plain`` (PPO, no correction), ``alp`` (unified ratio), ``alp_decoupled``; all with the
same number of updates per rollout. Results: ``runs.csv`` (a row per iteration), ``summary.csv`` (a row per run, means
over its last third) and ``alp.png`` (mean and range over the seeds).

    python -m benchmarks.alp_experiment --engines vllm_bf16 vllm_int8 --seeds 1 2 3     # needs vLLM
    python -m benchmarks.alp_experiment --engines perturbed --iterations 60             # any machine

Compared over all valid tokens of an iteration:

* ``sequence_p2``, ``sequence_p98``: percentiles of the sequence log-ratio current / engine in the forward passes of the
  update, with noise in the arms that have it; ``correlation``: Pearson correlation of the same token probabilities.
* ``plain_...``: the same for the policy before the update and without noise, from which the samples were drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import mismatch
from lightning_rlhf.experience import Experience, MiniBatch
from lightning_rlhf.functional.losses import PolicyLoss
from lightning_rlhf.functional.stats import select_valid
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.names import Metric, register
from lightning_rlhf.ppo import PPOModule

FAMILY = Metric("experiment/<name>", "1", "neither", "once", "What this experiment compares.")
ARMS = {
    "plain": ["alp=none"],
    "alp": ["alp=default"],
    "alp_decoupled": ["alp=decoupled"],
}
PANELS = ("reward", "envelope", "correlation", "plain_envelope", "plain_correlation", "sigma")


class Tails:
    """Log-ratios and probabilities of one iteration, collected per micro-batch."""

    def __init__(self) -> None:
        self.sequences: list[Tensor] = []
        self.tokens: list[Tensor] = []

    @torch.no_grad()
    def add(self, train: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Add ``[B, R]`` log-probabilities of the trainer and of the engine, and the mask of valid tokens."""
        mask = mask & rollout.isfinite()
        log_ratio = select_valid(train - rollout, mask).sum(-1)
        self.sequences.append(log_ratio[mask.any(-1)].double())
        self.tokens.append(torch.stack([train[mask].exp(), rollout[mask].exp()]).double())

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """The statistics; resets the collection for the next iteration."""
        sequences, tokens = torch.cat(self.sequences), torch.cat(self.tokens, dim=1)
        low, high = torch.quantile(sequences, sequences.new_tensor([0.02, 0.98])).tolist()
        self.sequences, self.tokens = [], []
        correlation = float(torch.corrcoef(tokens)[0, 1])
        names = {"sequence_p2": low, "sequence_p98": high, "envelope": high - low, "correlation": correlation}
        return {f"experiment/{prefix}{name}": value for name, value in names.items()}


class ObservedModule(PPOModule):
    """PPO that also reports the tails of the ratio, computed in the same way in every arm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register(FAMILY)
        self._before, self._during = Tails(), Tails()

    def prepare_experience(self, experience: Experience) -> MetricBatch | None:
        metrics = super().prepare_experience(experience)
        self._before.add(
            experience.require("old_logprobs"), experience.rollout_logprobs, experience.require("loss_mask")
        )
        return metrics

    def policy_loss(self, minibatch: MiniBatch, logprobs: Tensor) -> PolicyLoss:
        self._during.add(logprobs.detach(), minibatch.rollout_logprobs, minibatch.require("loss_mask"))
        return super().policy_loss(minibatch, logprobs)

    def update_metrics(self) -> dict[str, float]:
        return super().update_metrics() | self._during.numbers() | self._before.numbers("plain_")


def run(folder: Path, engine: str, arm: str, seed: int, arguments: argparse.Namespace) -> None:
    """One training run, unless its folder says that it is done."""
    noise = [] if arm == "plain" else [f"module.alp.warmup_steps={arguments.warmup_steps}", *arguments.alp]
    module = "module._target_=benchmarks.alp_experiment.ObservedModule"
    overrides = [*mismatch.engine_overrides(engine, arguments.noise), *ARMS[arm], module, *noise]
    mismatch.launch(folder, seed, arguments, [*overrides, f"module.update.epochs={arguments.epochs}"])


def plot(path: Path, rows: list[dict[str, Any]], arms: list[str], engines: list[str]) -> None:
    """A row of panels per engine: mean and range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(PANELS), 3.2 * len(engines)), layout="constrained")
    grid = figure.subplots(len(engines), len(PANELS), squeeze=False)
    for engine, axes in zip(engines, grid, strict=True):
        for name, panel in zip(PANELS, axes, strict=True):
            for arm in arms:
                points: dict[float, list[float]] = {}
                for row in rows:
                    if (row["engine"], row["arm"]) == (engine, arm) and name in row:
                        points.setdefault(row["iteration"], []).append(row[name])
                if points:
                    x = sorted(points)
                    line = panel.plot(x, [sum(points[i]) / len(points[i]) for i in x], label=arm)[0]
                    low, high = [min(points[i]) for i in x], [max(points[i]) for i in x]
                    panel.fill_between(x, low, high, alpha=0.15, color=line.get_color())
            panel.set(title=f"{engine}: {name}", xlabel="iteration")
        axes[0].legend()
    figure.savefig(path, dpi=100)


def summarise(rows: list[dict[str, Any]], held_out: float | None) -> dict[str, Any]:
    """Means over the last third of a run, where sigma has had time to learn."""
    last = rows[-max(1, len(rows) // 3) :]
    means: dict[str, Any] = {
        name: sum(row[name] for row in last) / len(last) for name in PANELS if all(name in row for row in last)
    }
    return means if held_out is None else means | {"held_out": held_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=mismatch.ENGINES, default=["vllm_bf16", "vllm_int8"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["plain", "alp"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--epochs", type=int, default=4, help="with one minibatch per epoch: updates per rollout")
    parser.add_argument("--warmup-steps", type=int, default=50, help="optimiser steps before sigma learns")
    parser.add_argument("--alp", nargs="*", default=[], help="more overrides of the arms with noise")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides of all arms")
    parser.add_argument("--noise", type=float, default=0.05, help="of the engine `perturbed`, relative to the weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/alp_experiment"))
    arguments = parser.parse_args()
    table: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    for engine in arguments.engines:
        for arm in arguments.arms:
            for seed in arguments.seeds:
                folder = (arguments.output / engine / arm / f"seed{seed}").absolute()
                run(folder, engine, arm, seed, arguments)
                rows, held_out = read(folder)
                which = {"engine": engine, "arm": arm, "seed": seed}
                table += [which | row for row in rows]
                summary.append(which | summarise(rows, held_out))
                print(summary[-1], flush=True)
    mismatch.write(arguments.output / "runs.csv", table)
    mismatch.write(arguments.output / "summary.csv", summary)
    plot(arguments.output / "alp.png", table, arguments.arms, arguments.engines)


def read(folder: Path) -> tuple[list[dict[str, Any]], float | None]:
    """The compared metrics by iteration, and the last score on held-out prompts."""
    rows: list[dict[str, Any]] = []
    records = mismatch.records(folder)
    for record in records:
        if "clock/iteration" not in record:
            continue
        kept = {"iteration": record["clock/iteration"], "reward": record["reward/mean"]}
        kept |= {n.removeprefix("experiment/"): v for n, v in record.items() if n.startswith("experiment/")}
        sigmas = [value for name, value in record.items() if name.startswith("alp/sigma_layer_")]
        rows.append(kept | ({"sigma": sum(sigmas) / len(sigmas)} if sigmas else {}))
    scores = [record["eval/exact_match"] for record in records if "eval/exact_match" in record]
    return rows, scores[-1] if scores else None


if __name__ == "__main__":
    main()
