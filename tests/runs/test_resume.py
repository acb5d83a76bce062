"""A run killed at any moment and resumed equals the run that was never interrupted, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import AdaptiveKL, GradientMonitor, KLEarlyStop
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState, latest_valid
from lightning_rlhf.errors import InputError
from lightning_rlhf.models import Policy
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.rewards import RewardBatch
from tests.ranks import run_ranks
from tests.support import Dies, even_digits, fit, same, tiny_module, tiny_policy, weights


def policy(kind: str) -> Policy:
    if kind == "lora":
        return tiny_policy(critic="shared", lora={"r": 4, "target_modules": ["q_proj", "v_proj"]})
    return tiny_policy(critic=kind)


def run(folder: Path, *, kind: str = "separate", dies: int = 0, resume: Path | None = None) -> ActorCriticModule:
    """Five iterations with everything that has state: controller, averages, running reward moments, schedules."""
    module = tiny_module(
        policy=policy(kind),
        iterations=5,
        reward_processing={"normalise": "running"},
        optimizer={"schedule": "cosine"},
        actor={"lr": 3e-3, "warmup_iterations": 2},
    )
    callbacks = [
        KLEarlyStop(target=0.01, patience=50),
        GradientMonitor(),
        AdaptiveKL(target=0.01, horizon=100),
        RNGState(),
        IterationCheckpoint(str(folder), every_n_iterations=2),
        *([Dies(dies)] if dies else []),
    ]
    fit(module, callbacks, folder=folder, resume=resume, enable_checkpointing=True)
    return module


def state(module: ActorCriticModule) -> dict[str, torch.Tensor]:
    """All state that must be equal in a resumed run: weights, moments, controllers, clocks."""
    optimizer = module.optimizers().optimizer
    moments = {
        f"moment.{i}.{key}": value
        for i, entries in enumerate(optimizer.state.values())
        for key, value in entries.items()
    }
    rates = {f"lr.{group['name']}": torch.tensor(group["lr"], dtype=torch.float64) for group in optimizer.param_groups}
    control = module.control
    numbers = {
        "kl_coefficient": control.value("kl_coefficient"),
        "iteration": control.iteration,
        "update": control.update,
        "reward mean": float(module.reward_moments.mean),
        "reward count": float(module.reward_moments.count),
        "epochs stopped": control.counts["stop_epochs"],
    }
    return weights(module) | moments | rates | {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}


def run_and_die(rank: int, folder: Path, kind: str) -> None:
    run(folder, kind=kind, dies=4)


@pytest.mark.parametrize("kind", ["separate", "lora"])
def test_kill_in_the_middle_of_an_iteration_and_resume(tmp_path: Path, kind: str) -> None:
    alone = {"world_size": 1, "process_group": False, "ends": [-signal.SIGKILL]}
    run_ranks(run_and_die, tmp_path, kind, folder=tmp_path, **alone)
    checkpoint = latest_valid(tmp_path)
    assert checkpoint is not None and checkpoint.name == "iteration_000002.ckpt"
    resumed = run(tmp_path, kind=kind, resume=checkpoint)
    whole = run(tmp_path / "whole", kind=kind)
    assert resumed.control.iteration == 5
    assert same(state(resumed), state(whole))


def test_a_reference_that_changed_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    checkpoint = latest_valid(tmp_path)
    other = tiny_module(policy=tiny_policy(seed=7), iterations=6)
    with pytest.raises(InputError, match="trained against another reference model"):
        fit(other, [RNGState()], folder=tmp_path, resume=checkpoint)


def test_the_value_head_returns_bitwise_and_a_missing_key_is_an_error(tmp_path: Path) -> None:
    module = run(tmp_path)
    checkpoint = latest_valid(tmp_path)
    saved = torch.load(checkpoint, weights_only=True)
    assert torch.equal(saved["state_dict"]["critic.head.weight"], module.critic.head.weight)  # type: ignore[union-attr]
    assert not any(name.startswith("reference.") for name in saved["state_dict"]), "the frozen copy is not saved again"
    del saved["state_dict"]["critic.head.weight"]
    broken = tmp_path / "broken.ckpt"
    torch.save(saved, broken)
    with pytest.raises(RuntimeError, match=r"critic\.head\.weight"):
        fit(tiny_module(iterations=6), [RNGState()], folder=tmp_path, resume=broken)


def test_a_changed_learning_rate_acts_on_resume(tmp_path: Path) -> None:
    run(tmp_path)
    module = tiny_module(iterations=6, actor={"lr": 5e-4, "clip_norm": 0.3})
    fit(module, [RNGState()], folder=tmp_path, resume=latest_valid(tmp_path))
    [actor] = [group for group in module.optimizers().param_groups if group["name"] == "actor"]
    assert actor["lr"] == 5e-4 and actor["clip_norm"] == 0.3 and module.control.iteration == 6


class Later:
    """A reward that changes with the number of responses scored, and whose state lives in a tensor and a number."""

    def __init__(self) -> None:
        self.seen, self.mean = 0, torch.zeros((), dtype=torch.float64)

    def __call__(self, batch: RewardBatch) -> list[float]:
        scores = even_digits(batch)
        self.mean += 0.1 * (sum(scores) / len(scores) - self.mean)
        self.seen += len(batch)
        return [score * self.seen - float(self.mean) for score in scores]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean = state["seen"], state["mean"]


def rewarded_by(reward: Later, folder: Path, iterations: int, resume: Path | None = None) -> ActorCriticModule:
    module = tiny_module(iterations=iterations, reward=reward)
    callbacks = [RNGState(), IterationCheckpoint(str(folder), every_n_iterations=2)]
    fit(module, callbacks, folder=folder, resume=resume, enable_checkpointing=True)
    return module


def test_a_reward_with_a_state_goes_on_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, resumed = Later(), Later()
    expected = weights(rewarded_by(whole, tmp_path / "whole", 4))
    rewarded_by(Later(), tmp_path, 2)
    file = latest_valid(tmp_path)
    assert file is not None
    module = rewarded_by(resumed, tmp_path, 4, resume=file)
    assert same(weights(module), expected)
    assert whole.seen == resumed.seen > 0 and torch.equal(whole.mean, resumed.mean)
    assert "no state of reward.terms" not in caplog.text
    earlier = torch.load(file, weights_only=True)
    del earlier["lightning_rlhf"]["rewards"]
    torch.save(earlier, tmp_path / "earlier.ckpt")
    rewarded_by(Later(), tmp_path / "again", 4, resume=tmp_path / "earlier.ckpt")
    assert "the checkpoint holds no state of reward.terms.score: it starts afresh" in caplog.text
