"""End the PPO epochs of a batch when the policy has moved far enough."""

from __future__ import annotations

import math
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import EpochStats, MinibatchStats, UpdateStats
from lightning_rlhf.module import ActorCriticModule


class KLEarlyStop(RLHFCallback):
    """Brakes on KL, by numbers reduced over all ranks.

    Two KLs, two limits: ``target`` bounds KL(old || current), how far one batch may move the policy; ``hard_limit``
    bounds KL(current || reference), how far the whole run may.

    Args:
        target: nats per token. An epoch that ends above it is the last one for this batch.
        per_minibatch: check every minibatch as well, by both limits and **before** its step: the step is skipped and
            the epochs end.
        hard_limit: nats per token against the reference; above it the epochs end. ``None``: off.
        rollback: at ``hard_limit`` also restore weights and optimiser state from before this batch; costs one copy
            of both.
        patience: the run has failed after this many iterations in a row whose last epoch was over 1.5 x ``target``.
            ``None``: never. An iteration without a minibatch is not counted.
    """

    def __init__(
        self,
        target: float = 0.1,
        per_minibatch: bool = False,
        hard_limit: float | None = None,
        rollback: bool = False,
        patience: int | None = None,
    ) -> None:
        bounded("kl_early_stop", above=0, target=target)
        bounded("kl_early_stop", above=0, optional=True, hard_limit=hard_limit)
        bounded("kl_early_stop", at_least=1, whole=True, optional=True, patience=patience)
        if rollback and hard_limit is None:
            raise ValueError("callbacks.kl_early_stop.rollback = True needs callbacks.kl_early_stop.hard_limit")
        self.target, self.per_minibatch, self.patience = target, per_minibatch, patience
        self.hard_limit, self.rollback = hard_limit, rollback
        if rollback:
            self.rollback_scopes = frozenset({"iteration"})
        self.over_target = 0
        self._braked_in = 0
        """Iteration whose epochs a minibatch has ended: the end of the epoch does not say it again."""

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        if not self.per_minibatch:
            return
        where = f"epoch {stats.epoch}, minibatch {stats.minibatch}"
        if stats.kl_old > self.target:
            reason = f"kl/old {stats.kl_old:.4f} over target {self.target} in {where}"
            module.control.skip_step(reason)
            module.control.stop_epochs(reason)
            self._braked_in = stats.iteration
        # Before the first step the policy is still the one that sampled: an earlier update exceeded the limit, and
        # there is nothing to undo. Skipping the step would keep the run over the limit for ever.
        if (stats.epoch, stats.minibatch) != (0, 0) and self._over_hard_limit(module, stats.kl_ref, where):
            module.control.skip_step(f"kl/ref {stats.kl_ref:.4f} over hard limit {self.hard_limit} in {where}")

    def on_ppo_epoch_end(self, trainer: Trainer, module: ActorCriticModule, stats: EpochStats) -> None:
        if stats.kl_old > self.target and self._braked_in != stats.iteration:
            module.control.stop_epochs(f"kl/old {stats.kl_old:.4f} over target {self.target} in epoch {stats.epoch}")
        self._over_hard_limit(module, stats.kl_ref, f"epoch {stats.epoch}")

    def _over_hard_limit(self, module: ActorCriticModule, kl_ref: float, where: str) -> bool:
        if self.hard_limit is None or not kl_ref > self.hard_limit:
            return False
        reason = f"kl/ref {kl_ref:.4f} over hard limit {self.hard_limit} in {where}"
        module.control.stop_epochs(reason)
        if self.rollback:
            module.control.rollback(reason, to="iteration")
        return True

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        if stats.epochs_used == 0 or math.isnan(stats.kl_old):
            return  # nothing was measured
        self.over_target = self.over_target + 1 if stats.kl_old > 1.5 * self.target else 0
        if self.patience is not None and self.over_target >= self.patience:
            module.control.stop_training(
                f"kl/old over 1.5 x {self.target} in {self.over_target} iterations in a row (last {stats.kl_old:.4f})",
                failed=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"over_target": self.over_target}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.over_target = state_dict["over_target"]
