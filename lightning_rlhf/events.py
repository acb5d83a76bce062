"""RL events: their names, the stats that callbacks receive, and the function that calls them."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lightning_rlhf.metrics.names_evaluation import HELD_OUT

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
    "on_evaluation_scored",
    "on_evaluation_end",
)


# A number that was not measured is NaN in every stats object, never 0, so no limit applies (``nan > limit`` is false).
# Code that averages, integrates or takes a maximum must skip values that are not ``math.isfinite``. docs/extending.md
# lists the fields below with their texts; a test compares.


@dataclass(frozen=True)
class ExperienceStats:
    """Globally reduced view of the experience of one iteration, before any update."""

    iteration: int
    """Counted from 1."""
    sequences: int
    """Responses of all ranks."""
    tokens: int
    """Generated tokens of all ranks, rejected ones included."""
    score_mean: float
    """Mean score of the policy's own responses, before clipping, normalisation and KL penalty; NaN if a safety filter
    has replaced or left out all of them."""
    score_std: float
    """Spread of these scores over all ranks; NaN with the mean."""
    entropy: float
    """Mean entropy of the policy, nats per token; NaN where the old policy is not scored (bypass mode)."""
    kl_ref: float
    """Current policy against reference, nats per token, in the configured estimator; NaN without reference."""
    advantage_abs_mean: float
    """Mean |advantage| of the accepted tokens, as the loss sees it."""
    advantage_raw_abs_mean: float
    """Before whitening, which would hide how weak the signal is."""
    response_length_mean: float
    """Generated tokens of a sequence."""
    truncated_fraction: float
    """Share of sequences that reached the length limit."""

    @classmethod
    def of(cls, iteration: int, numbers: Mapping[str, float]) -> ExperienceStats:
        """From the metrics of the experience; an absent metric becomes NaN."""
        return cls(
            iteration=iteration,
            sequences=int(numbers["batch/sequences"]),
            tokens=int(numbers["batch/tokens"]),
            score_mean=numbers.get("reward/mean", math.nan),
            score_std=numbers.get("reward/std", math.nan),
            entropy=numbers.get("entropy/mean", math.nan),
            kl_ref=numbers.get("kl/ref", math.nan),
            advantage_abs_mean=numbers.get("advantage/abs_mean", math.nan),
            advantage_raw_abs_mean=numbers.get("advantage/raw_abs_mean", math.nan),
            response_length_mean=numbers["response/length_mean"],
            truncated_fraction=numbers["response/truncated_fraction"],
        )


@dataclass(frozen=True)
class MinibatchStats:
    """Globally reduced numbers of one minibatch, from the forward pass **before** its step."""

    iteration: int
    """Counted from 1."""
    update: int
    """Optimiser steps of the run before this one."""
    epoch: int
    """Counted from 0 in each iteration."""
    minibatch: int
    """Counted from 0 in each epoch."""
    tokens: float
    """Accepted tokens of all ranks, those in the loss; 0 if rejection by the current policy removed all."""
    policy_loss: float
    """In the configured aggregation."""
    value_loss: float
    """Before its coefficient; NaN without a critic."""
    kl_old: float
    """KL(old || current), nats per token, estimator k3 over accepted tokens."""
    kl_ref: float
    """KL(current || reference), nats per token, estimator k3 on the old policy's tokens; NaN without reference."""
    clip_fraction: float
    """Share of accepted tokens where the clip is active."""
    ratio_max: float
    """Largest current / old probability of an accepted token."""
    entropy: float = math.nan
    """Mean entropy of the current policy over accepted tokens, nats per token (with noise where ALP is on)."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """Norm per parameter group, before clipping."""
    clipped: dict[str, bool] = field(default_factory=dict)
    """Whether the group's norm was over its limit."""
    finite: bool = True
    """Whether loss and gradient norms are finite; if not, the step is skipped whatever callbacks say."""
    stepped: bool = False
    """Whether the optimiser took the step; always false in `on_before_step`."""


@dataclass(frozen=True)
class EpochStats:
    """One PPO epoch: token-weighted means over the minibatches that measured a number (``ratio_max``: the maximum)."""

    iteration: int
    """Counted from 1."""
    epoch: int
    """Counted from 0 in each iteration."""
    minibatches: int
    """Minibatches with an accepted token that were reached."""
    kl_old: float
    """KL(old || current), nats per token."""
    kl_ref: float
    """KL(current || reference), nats per token; NaN without reference."""
    clip_fraction: float
    """Share of accepted tokens where the clip is active."""
    ratio_max: float
    """Largest current / old probability of an accepted token."""
    entropy: float = math.nan
    """Mean entropy of the current policy, nats per token."""

    @classmethod
    def over(cls, minibatches: Sequence[MinibatchStats]) -> EpochStats:
        """From an epoch's minibatches: at least one, each with an accepted token.

        A minibatch with a non-finite forward pass is counted, but its NaNs are left out of the means, so that callbacks
        still see what the others measured.
        """

        def measured(name: str) -> list[tuple[float, float]]:
            pairs = [(stats.tokens, getattr(stats, name)) for stats in minibatches]
            return [(tokens, value) for tokens, value in pairs if not math.isnan(value)]

        def mean(name: str) -> float:
            pairs = measured(name)
            return sum(w * value for w, value in pairs) / sum(w for w, _ in pairs) if pairs else math.nan

        return cls(
            iteration=minibatches[0].iteration,
            epoch=minibatches[0].epoch,
            minibatches=len(minibatches),
            kl_old=mean("kl_old"),
            kl_ref=mean("kl_ref"),
            clip_fraction=mean("clip_fraction"),
            ratio_max=max((value for _, value in measured("ratio_max")), default=math.nan),
            entropy=mean("entropy"),
        )


@dataclass(frozen=True)
class UpdateStats:
    """The whole update of one iteration."""

    iteration: int
    """Counted from 1."""
    epochs_used: int
    """Passes over the experience that reached a minibatch with an accepted token."""
    steps: int
    """Optimiser steps taken."""
    steps_skipped: int
    """Minibatches with an accepted token whose step was not taken."""
    kl_old: float
    """KL(old || current) of the last epoch that ran, as are the fields below; NaN if none ran."""
    kl_ref: float
    """KL(current || reference), nats per token; NaN without reference."""
    clip_fraction: float
    """Share of accepted tokens where the clip is active."""
    entropy: float = math.nan
    """Mean entropy of the current policy, nats per token."""


@dataclass(frozen=True)
class EvaluationStats:
    """The greedy answers to the held-out prompts of all ranks."""

    iteration: int
    """Iterations trained before; 0 before training."""
    training: bool
    """Whether training goes on afterwards; false for the evaluations before and after training."""
    reward_mean: float
    """Mean score of an answer."""
    response_length_mean: float
    """Generated tokens of an answer."""
    truncated_fraction: float
    """Share of answers that reached the length limit."""

    @classmethod
    def of(cls, iteration: int, training: bool, numbers: Mapping[str, float]) -> EvaluationStats:
        """From the metrics of the evaluation; an absent metric becomes NaN."""
        return cls(iteration, training, *(numbers.get(f"eval/{name}", math.nan) for name in HELD_OUT))


STATS = (ExperienceStats, MinibatchStats, EpochStats, UpdateStats, EvaluationStats)


def stats_tables() -> str:
    """The tables of ``docs/extending.md``: every field of every ``stats`` object with its type and meaning."""
    lines: list[str] = []
    for kind in STATS:
        lines += ["", f"| `{kind.__name__}` | type | meaning |", "| --- | --- | --- |"]
        [definition] = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        # A field's meaning is the text below it.
        for declared, text in pairwise(definition.body):
            if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
                meaning = " ".join(str(ast.literal_eval(text.value)).split()).replace("|", r"\|")
                lines.append(f"| `{ast.unparse(declared.target)}` | {ast.unparse(declared.annotation)} | {meaning} |")
    return "\n".join(lines[1:]) + "\n"


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
