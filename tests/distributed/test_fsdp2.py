"""FSDP2 in real processes on gloo: gradients, norms, a whole run, checkpoints at other world sizes, export."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.experience import Experience
from tests.distributed.fsdp2_ranks import GRADIENTS, gradients_of
from tests.support import fit, tiny_module, tiny_policy

ROOT = Path(__file__).resolve().parents[2]


def torchrun(module: str, folder: Path, *arguments: str, processes: int = 2, timeout: float = 400) -> str:
    """Start a module in several processes and wait; a hang fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", module, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
    return done.stdout


class Keep(RLHFCallback):
    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience, stats: Any) -> None:
        self.experience = {f.name: getattr(experience, f.name) for f in fields(Experience)}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process and each of two ranks found; the experience is scored by one process."""
    folder = tmp_path_factory.mktemp("gradients")
    scored, alone = {}, {}
    for name, settings in GRADIENTS.items():
        keep = Keep()
        module = tiny_module(policy=tiny_policy(**settings["policy"]), iterations=1, max_new_tokens=9)
        fit(module, [keep], folder=folder)
        scored[name] = keep.experience
        alone[name] = gradients_of(name, keep.experience)
    torch.save(scored, folder / "experience.pt")
    torchrun("tests.distributed.fsdp2_ranks", folder, str(folder))
    return [alone, *(torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_process(gradients: list[dict[str, Any]], name: str) -> None:
    alone, *ranks = (found[name] for found in gradients)
    assert len(alone) == 4, "minibatches of 5, 5, 5 and 1 rows"
    for rank in ranks:
        assert len(rank) == len(alone)
        for mine, expected in zip(rank, alone, strict=True):
            assert mine.keys() == expected.keys()
            for key, gradient in expected.items():
                difference = (mine[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
                assert difference < 1e-5, f"{key}: {difference}"
    used = {key.partition(".")[0] for key in alone[0]}
    assert {"actor", "critic"} <= used and ("perturbation" in used) == ("ALP" in name)


@pytest.mark.slow
def test_norm_and_clipping_are_of_all_shards(gradients: list[dict[str, Any]]) -> None:
    found = [rank["B64"] for rank in gradients[1:]]
    assert [entry["norm"] for entry in found] == [5.0, 5.0]
    assert [entry["clipped"] for entry in found] == pytest.approx([0.6, 0.8], rel=1e-5)
