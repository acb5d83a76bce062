"""RL events: what callbacks are told, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning import LightningModule

EVENTS = (
    "on_rollout_start",
    "on_rollout_end",
    "on_experience_scored",
    "on_experience_ready",
    "on_ppo_epoch_start",
    "on_minibatch_start",
    "on_before_step",
    "on_minibatch_end",
    "on_ppo_epoch_end",
    "on_update_end",
)


@dataclass(frozen=True)
class ExperienceStats:
    """Globally reduced view of the experience of one iteration, before any update."""

    iteration: int
    sequences: int
    tokens: int
    score_mean: float
    score_std: float
    """Spread of the scores over the sequences of all ranks."""
    entropy: float
    """Mean entropy of the policy, nats per token; NaN where the old policy is not scored (bypass mode)."""
    kl_ref: float
    """Current policy against reference, nats per token, in the configured estimator; 0 without reference."""
    advantage_abs_mean: float
    advantage_raw_abs_mean: float
    """Before whitening, which would hide how weak the signal is."""
    response_length_mean: float
    truncated_fraction: float


@dataclass(frozen=True)
class MinibatchStats:
    """Globally reduced numbers of one minibatch, from the forward pass **before** its step."""

    iteration: int
    update: int
    epoch: int
    minibatch: int
    tokens: float
    policy_loss: float
    value_loss: float
    kl_old: float
    """KL(old || current), nats per token, estimator k3 over valid tokens."""
    kl_ref: float
    """KL(current || reference), nats per token, estimator k3 on the old policy's tokens; 0 without reference."""
    clip_fraction: float
    ratio_max: float
    grad_norms: dict[str, float] = field(default_factory=dict)
    """Norm per parameter group before clipping; empty at ``on_minibatch_start``."""
    clipped: dict[str, bool] = field(default_factory=dict)
    """Whether the group's norm was over its limit."""
    finite: bool = True
    """Whether loss and gradient norms are finite; if not, the step is skipped whatever callbacks say."""
    stepped: bool = False
    """Whether the optimiser took the step; always false in ``on_before_step``."""


@dataclass(frozen=True)
class EpochStats:
    """One PPO epoch: token-weighted means over its minibatches (a maximum is a maximum)."""

    iteration: int
    epoch: int
    minibatches: int
    kl_old: float
    kl_ref: float
    clip_fraction: float
    ratio_max: float


@dataclass(frozen=True)
class UpdateStats:
    """The whole update of one iteration."""

    iteration: int
    epochs_used: int
    steps: int
    steps_skipped: int
    kl_old: float
    """Of the last epoch that ran."""
    kl_ref: float
    clip_fraction: float


def emit(module: LightningModule, event: str, *args: Any) -> None:
    """Tell every callback of the trainer that defines ``event``; plain Lightning callbacks are left alone.

    Callbacks are asked in the trainer's order, as Lightning does for its own hooks, and appear in its profiler.
    """
    if event not in EVENTS:
        raise ValueError(f"unknown event {event!r}; allowed: {', '.join(EVENTS)}")
    trainer: Any = module.trainer
    for callback in trainer.callbacks:
        handler = getattr(callback, event, None)
        if handler is not None:
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{event}"):
                handler(trainer, module, *args)
