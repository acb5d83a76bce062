"""End the PPO epochs of a batch when the policy has moved far enough."""

from __future__ import annotations

from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.events import EpochStats, MinibatchStats, UpdateStats
from lightning_rlhf.module import ActorCriticModule


class KLEarlyStop(RLHFCallback):
    """Brakes on KL, judged on numbers reduced over all ranks.

    Two KLs, two limits: ``target`` bounds KL(old || current), how far one batch may move the policy; ``hard_limit``
    bounds KL(current || reference), how far the whole run may.

    Args:
        target: nats per token. An epoch that ends above it is the last one for this batch.
        per_minibatch: judge every minibatch as well, **before** its step: the step is skipped and the epochs end.
        hard_limit: nats per token against the reference; above it the epochs end. ``None``: off.
        rollback: at ``hard_limit`` also return to the weights and optimiser state before this batch; costs one copy
            of both.
        patience: stop training after this many iterations in a row whose last epoch was over 1.5 x ``target``.
            ``None``: never.
    """

    def __init__(
        self,
        target: float = 0.02,
        per_minibatch: bool = False,
        hard_limit: float | None = None,
        rollback: bool = False,
        patience: int | None = None,
    ) -> None:
        for name, value in (("target", target), ("hard_limit", hard_limit), ("patience", patience)):
            if value is not None and not value > 0:
                raise ValueError(f"callbacks.kl_early_stop.{name} = {value!r} is not allowed: a number > 0")
        if rollback and hard_limit is None:
            raise ValueError("callbacks.kl_early_stop.rollback = True needs callbacks.kl_early_stop.hard_limit")
        self.target, self.per_minibatch, self.patience = target, per_minibatch, patience
        self.hard_limit, self.rollback = hard_limit, rollback
        if rollback:
            self.rollback_scopes = frozenset({"iteration"})
        self.over_target = 0

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        if self.per_minibatch and stats.kl_old > self.target:
            reason = f"kl/old {stats.kl_old:.4f} over target {self.target} in minibatch {stats.minibatch}"
            module.control.skip_step(reason)
            module.control.stop_epochs(reason)

    def on_ppo_epoch_end(self, trainer: Trainer, module: ActorCriticModule, stats: EpochStats) -> None:
        if stats.kl_old > self.target:
            module.control.stop_epochs(f"kl/old {stats.kl_old:.4f} over target {self.target} in epoch {stats.epoch}")
        if self.hard_limit is not None and stats.kl_ref > self.hard_limit:
            reason = f"kl/ref {stats.kl_ref:.4f} over hard limit {self.hard_limit} in epoch {stats.epoch}"
            module.control.stop_epochs(reason)
            if self.rollback:
                module.control.rollback(reason, to="iteration")

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        self.over_target = self.over_target + 1 if stats.kl_old > 1.5 * self.target else 0
        if self.patience is not None and self.over_target >= self.patience:
            module.control.stop_training(
                f"kl/old over 1.5 x {self.target} in {self.over_target} iterations in a row (last {stats.kl_old:.4f})"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"over_target": self.over_target}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.over_target = state_dict["over_target"]
