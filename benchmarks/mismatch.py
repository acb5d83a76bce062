"""Does a gap between engine and trainer hurt, and does correction help? The quickstart on engines with a gap.

Every combination of engine, preset and seed is one ``lightning-rlhf train`` in its own process; a run whose folder
is complete is not repeated. Results: ``runs.csv`` (a row per iteration), ``summary.csv`` (a row per run) and
``mismatch.png`` (reward and KL(engine || trainer) against iterations, held-out scores before and after).

    python -m benchmarks.mismatch --engines perturbed                      # any machine, minutes per run
    python -m benchmarks.mismatch --engines vllm_bf16 vllm_int8 vllm_int4  # needs vLLM
    python -m benchmarks.mismatch --engines perturbed --noise 0.1 --iterations 60 --set module.update.epochs=8

Engines: ``exact`` and ``perturbed`` are Hugging Face generation on the trained weights and on a copy of them with
relative Gaussian noise; ``vllm_bf16`` is vLLM in bfloat16, ``vllm_int8`` and ``vllm_int4`` round the weights it gets.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.rollout import HFEngine

COLUMNS = {
    "reward/mean": "reward",
    "rollout_corr/k3_kl": "k3_kl",
    "rollout_corr/chi2_token": "chi2_token",
    "rollout_corr/rollout_probs_diff_max": "probs_diff_max",
    "rollout_corr/is_used_ess": "ess",
    "rollout_corr/accepted_fraction": "accepted",
    "grad_norm/actor": "grad_norm",
    "kl/ref": "kl_ref",
}
"""Metrics that are kept, and their names in the table."""

ENGINES = ("exact", "perturbed", "vllm_bf16", "vllm_int8", "vllm_int4")
PRESETS = ("monitor", "token_tis", "geometric_rs_token_tis", "bypass")
UNCORRECTED = "monitor"


class PerturbedEngine(HFEngine):
    """Samples from weights ``w (1 + noise * g)`` with standard normal ``g``, the same in every iteration.

    When :meth:`generate` returns, the trained weights are unchanged, bit for bit. Greedy evaluation has no noise.

    Args:
        noise: relative size.
        noise_seed: of ``g``.
        options: of :class:`lightning_rlhf.rollout.HFEngine`.
    """

    def __init__(self, noise: float = 0.05, noise_seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        if not noise >= 0:
            raise ValueError(f"rollout.noise = {noise!r} is not allowed: a number >= 0")
        self.noise, self.noise_seed = noise, noise_seed

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        options: dict[str, Any] = {"samples": samples, "max_new_tokens": max_new_tokens, "seed": seed, "greedy": greedy}
        if greedy:
            return super().generate(prompts, **options)
        model, _ = self._require_setup()
        parameters = list(model.lm.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        generator = torch.Generator().manual_seed(self.noise_seed)
        try:
            with torch.no_grad():
                for parameter in parameters:
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                    parameter.mul_(1 + self.noise * noise)
            return super().generate(prompts, **options)
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, kept, strict=True):
                    parameter.copy_(weight)


def engine_overrides(engine: str, noise: float) -> list[str]:
    """Overrides that select an engine."""
    return {
        "exact": [],
        "perturbed": ["rollout._target_=benchmarks.mismatch.PerturbedEngine", f"+rollout.noise={noise}"],
        "vllm_bf16": ["rollout=vllm", "rollout.dtype=bfloat16"],
        "vllm_int8": ["rollout=vllm", "rollout.weight_bits=8"],
        "vllm_int4": ["rollout=vllm", "rollout.weight_bits=4"],
    }[engine]


def run(folder: Path, engine: str, preset: str, seed: int, arguments: argparse.Namespace) -> None:
    """One training run, unless its folder says that it is done."""
    launch(folder, seed, arguments, [*engine_overrides(engine, arguments.noise), f"rollout_correction={preset}"])


def launch(folder: Path, seed: int, arguments: argparse.Namespace, overrides: list[str]) -> None:
    """``lightning-rlhf train`` in its own process, unless the folder says that it is done."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    common = [
        f"seed={seed}",
        f"iterations={arguments.iterations}",
        f"threads={arguments.threads}",
        f"output_dir={folder}",
        "warmup=half_right",
        "logger=csv",
        "callbacks=none",
        "trainer.enable_progress_bar=false",
    ]
    command = [sys.executable, "-m", "lightning_rlhf.cli", "train", *overrides, *common, *arguments.set]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        raise SystemExit(f"{folder}: exit code {status}, see {folder / 'log.txt'}")
    (folder / "done").touch()


def read(folder: Path) -> tuple[list[dict[str, float]], list[float]]:
    """The kept metrics of every iteration, and the scores on held-out prompts, the first before training."""
    rows = records(folder)
    iterations = []
    for row in rows:
        if "clock/iteration" in row:
            kept = {short: row[name] for name, short in COLUMNS.items() if name in row}
            iterations.append({"iteration": row["clock/iteration"], **kept})
    held_out = [row["eval/exact_match"] for row in rows if "eval/exact_match" in row]
    return iterations, held_out


def records(folder: Path) -> list[dict[str, float]]:
    """All metrics that a run logged, one record per iteration or evaluation."""
    with (folder / "metrics" / "metrics.csv").open(encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)


def summarise(
    engine: str, preset: str, seed: int, rows: list[dict[str, float]], held_out: list[float]
) -> dict[str, Any]:
    """Mean reward of the run's last tenth, its best earlier moving average, and the gap between engine and trainer."""
    window = max(1, len(rows) // 10)
    rewards = [row["reward"] for row in rows]
    averages = [sum(rewards[i : i + window]) / window for i in range(len(rewards) - window + 1)]
    return {
        "engine": engine,
        "preset": preset,
        "seed": seed,
        "final_reward": round(averages[-1], 4),
        "best_reward": round(max(averages), 4),
        "held_out_before": held_out[0],
        "held_out": held_out[-1],
        "mean_k3_kl": sum(row["k3_kl"] for row in rows) / len(rows),
        "largest_chi2_token": max(row["chi2_token"] for row in rows),
    }


def plot(
    path: Path, runs: list[dict[str, Any]], summary: list[dict[str, Any]], engines: list[str], presets: list[str]
) -> None:
    """Reward and gap by iteration (mean and range over the seeds); held-out score of every seed, before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(engines), 3, figsize=(13, 3.6 * len(engines)), squeeze=False)
    for line, engine in enumerate(engines):
        axes[line][2].set_ylabel("held-out exact match of the trained model")
        for preset in presets:
            scores = [row for row in summary if (row["engine"], row["preset"]) == (engine, preset)]
            ends = [[row["held_out_before"] for row in scores], [row["held_out"] for row in scores]]
            axes[line][2].plot(["before", "after"], ends, "o-", color=f"C{presets.index(preset)}")
        for column, quantity in enumerate(("reward", "k3_kl")):
            axis = axes[line][column]
            for preset in presets:
                by_iteration: dict[float, list[float]] = {}
                for row in runs:
                    if (row["engine"], row["preset"]) == (engine, preset):
                        by_iteration.setdefault(row["iteration"], []).append(row[quantity])
                steps = sorted(by_iteration)
                label = "no correction" if preset == UNCORRECTED else preset
                axis.plot(steps, [sum(by_iteration[s]) / len(by_iteration[s]) for s in steps], label=label)
                lowest, highest = ([edge(by_iteration[s]) for s in steps] for edge in (min, max))
                axis.fill_between(steps, lowest, highest, alpha=0.2)
            axis.set_title(engine)
            axis.set_ylabel(
                "mean reward of the engine's samples"
                if quantity == "reward"
                else "KL(engine || trainer), nats per token"
            )
            if quantity == "k3_kl":
                axis.set_yscale("log")
            axis.set_xlabel("iteration")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["exact", "perturbed"])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="files of conf/rollout_correction")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--noise", type=float, default=0.05, help="relative noise of the perturbed engine's weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides of every run")
    parser.add_argument("--output", type=Path, default=Path("outputs/mismatch"))
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    root = arguments.output.resolve()
    for engine in arguments.engines:
        for preset in arguments.presets:
            for seed in arguments.seeds:
                folder = root / engine / preset / f"seed_{seed}"
                run(folder, engine, preset, seed, arguments)
                rows, held_out = read(folder)
                runs += [{"engine": engine, "preset": preset, "seed": seed, **row} for row in rows]
                summary.append(summarise(engine, preset, seed, rows, held_out))
                print(", ".join(f"{name} {value}" for name, value in summary[-1].items()), flush=True)
    write(root / "runs.csv", runs)
    write(root / "summary.csv", summary)
    plot(root / "mismatch.png", runs, summary, arguments.engines, arguments.presets)
    print(f"written: {root / 'runs.csv'}, {root / 'summary.csv'}, {root / 'mismatch.png'}")


if __name__ == "__main__":
    main()
