"""One seed for everything: what each rank draws, where the seeds are recorded, and equal runs from equal seeds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlhf import cli
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.checkpoint.random_state import RNGState
from lightning_rlhf.distributed.strategies import DDPStrategy
from lightning_rlhf.models.tiny import build_tiny
from lightning_rlhf.seeds import RankSeeds, seed_of_rank
from tests.distributed.test_launch import mlflow_run
from tests.ranks import run_ranks
from tests.runs.test_going_on import TINY, project  # noqa: F401
from tests.support import fit, tiny_module


class Draws(RLHFCallback):
    """One number of every global generator in each iteration."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))


def drawn_in(rank: int, folder: str, iterations: int, resume: str | None) -> list[tuple[float, float, float]]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    draws = Draws()
    callbacks = [RankSeeds(), RNGState(), draws, IterationCheckpoint(folder, every_n_iterations=1)]
    module = tiny_module(iterations=iterations)
    fit(module, callbacks, devices=2, strategy=DDPStrategy(), resume=resume, enable_checkpointing=True)
    return draws.drawn


def test_ranks_draw_other_numbers_and_go_on_where_they_were(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "resumed", "checkpoints")]
    for folder in folders:
        folder.mkdir()
    checkpoints = str(folders[2])
    first, second = run_ranks(drawn_in, checkpoints, 2, None, folder=folders[0], process_group=False)
    assert len(first) == 2 and not {*sum(first, ())} & {*sum(second, ())}
    saved = folders[2] / "iteration_000001.ckpt"
    seeds = torch.load(saved, weights_only=True)["seeds"]
    assert seeds == {"run": 1, "ranks": [1, seed_of_rank(1, 1)]} and seeds["ranks"][1] > 2**32
    again = run_ranks(drawn_in, checkpoints, 2, str(saved), folder=folders[1], process_group=False)
    assert again == [first[1:], second[1:]]


@pytest.fixture
def same_model(project: Path) -> Path:  # noqa: F811
    """Two folders with the same weights; the configuration of one has dropout."""
    made = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2)
    for name, rate in (("plain", 0.0), ("dropout", 0.5)):
        made.lm.config.attention_dropout = rate
        made.lm.save_pretrained(project / name)
        made.tokenizer.save_pretrained(project / name)
    return project


@pytest.mark.slow
def test_two_commands_of_one_seed_are_equal_bit_for_bit_with_dropout_in_one_config(same_model: Path) -> None:
    """With noise on the hidden states and a warm-up; one in a process of its own, whose hashes of texts differ."""
    words = [word for word in TINY if not word.startswith(("model.source", "warmup", "logger"))]
    words += ["model=hf", "iterations=2", "callbacks=checkpoint", "callbacks.checkpoint.every_n_iterations=1"]
    words += [
        "alp=default",
        "warmup=sft",
        "warmup.steps=3",
        "warmup.lr=1e-3",
        "module.actor.lr=1e-3",
        "trainer.deterministic=true",
    ]
    words += ["trainer.accelerator=cpu", "logger=mlflow"]
    try:
        assert cli.main(["train", *words, "model.source.path=dropout", "hydra.run.dir=first"]) == 0
        assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    command = [str(Path(sys.executable).parent / "lightning-rlhf"), "train", *words]
    other = os.environ | {"PYTHONHASHSEED": "7", "LIGHTNING_RLHF_CACHE": str(same_model / "cache")}
    done = subprocess.run(
        [*command, "model.source.path=plain", "hydra.run.dir=second"],
        env=other,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        torch.load(same_model / name / "checkpoints" / "iteration_000002.ckpt", weights_only=True)["state_dict"]
        for name in ("first", "second")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    tracked = mlflow_run(same_model / "first")
    assert tracked.data.params["seed"] == "1" and tracked.data.tags["seeds/ranks"] == "1"
