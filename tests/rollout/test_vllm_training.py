"""PPO on samples of a real vLLM engine, by the command line, against the same runs on the embedded engine."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs_smollm2

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of each iteration of a run in a process of its own."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    # As for most users: OpenMP's own number of threads differs from that of the configuration.
    del environment["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "lightning_rlhf.cli", "train", "logger=csv", "trainer.enable_progress_bar=false"]
    command += ["threads=1", f"hydra.run.dir={folder}"]
    done = subprocess.run([*command, *overrides], cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [path] = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "reward/mean" in row]


RUNS = {"hf": ["rollout=hf"], "vllm": ["rollout=vllm"], "ahead": ["rollout=vllm", "rollout.lag=1"]}
# Sums of two digits, on a model that has seen what an answer looks like and guesses.
TASK = [
    "data.train.max_value=9",
    "data.validation.size=5",
    "data.prompts_per_iteration=128",
    "rollout.max_new_tokens=3",
    *("model.source.hidden_size=64", "model.source.heads=2", "model.source.layers=2"),
    *("warmup=sft", "warmup.steps=300", "warmup.lr=2e-3", "warmup.target=0.7"),
    *("module.update.epochs=2", "module.update.minibatch_size=64"),
    *("module.actor.lr=5e-4", "module.critic.lr=5e-4", "module.actor.clip_norm=4"),
    "module.advantage.gae_lambda=0.95",
    "module.reward_processing.normalise=none",
    "module.loss.entropy_coefficient=0.01",
    "module.kl.coefficient=0.002",
    "module.optimizer.schedule=constant",
    *("iterations=30", "callbacks.checkpoint=null", "callbacks.calibrate.every=10"),
]


def test_a_tiny_model_learns_on_vllm_as_on_the_embedded_engine_and_one_iteration_ahead(tmp_path: Path) -> None:
    cache = f"warmup.cache_dir={tmp_path / 'cache'}"
    curves = {name: train(tmp_path / name, *overrides, *TASK, cache) for name, overrides in RUNS.items()}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for name, rows in curves.items():
        rewards = [row["reward/mean"] for row in rows]
        first[name], last[name] = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
        assert max(row.get("calibrate/logprob_abs_diff_max", 0.0) for row in rows) <= 1e-4
        assert last[name] > first[name] + 0.3
        assert [row["rollout/staleness_max"] for row in rows] == [0.0, *[float(name == "ahead")] * 29]
    assert last["vllm"] == pytest.approx(last["hf"], abs=0.1)
    gaps = {name: curves[name][-1]["rollout/logprob_abs_diff_mean"] for name in RUNS}
    assert gaps["vllm"] < 1e-4 < 1e-2 < gaps["ahead"], "the samples of the run ahead come from other weights"


@needs_smollm2
def test_smollm2_trains_on_vllm(smollm2: Path, tmp_path: Path) -> None:
    small = [
        f"model.source.path={smollm2}",
        "iterations=2",
        "data.prompts_per_iteration=16",
        "module.update.minibatch_size=8",
        "data.validation.size=4",
    ]
    rows = train(tmp_path / "run", "experiment=smollm2_arithmetic", "rollout=vllm", *small)
    assert [row["rollout/staleness_max"] for row in rows] == [0, 0]
    # The trainer multiplies in bfloat16, or in float32 where the CPU has no such arithmetic, vLLM in float32, each in
    # its own order: a gap, and a small one.
    assert 0 < rows[0]["calibrate/logprob_abs_diff_mean"] < 0.1
    assert all(row["rollout/logprob_abs_diff_mean"] < 0.1 for row in rows)
