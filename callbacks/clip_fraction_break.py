"""End the PPO epochs of a batch when most of its tokens are clipped."""

from __future__ import annotations

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import EpochStats, MinibatchStats
from lightning_rlhf.module import ActorCriticModule


class ClipFractionBreak(RLHFCallback):
    """Ends the epochs when most tokens are clipped: clipped tokens have no gradient, so further passes learn little.

    Decides by ``ppo/clip_fraction``, the share of valid tokens of all ranks where the clip acts.

    Args:
        limit: an epoch that ends above it is the last one for this batch.
        per_minibatch: check every minibatch as well, **before** its step: the step is skipped and the epochs end.
    """

    def __init__(self, limit: float = 0.5, per_minibatch: bool = False) -> None:
        bounded("clip_fraction_break", above=0, below=1, limit=limit)
        self.limit, self.per_minibatch = limit, per_minibatch

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        if self.per_minibatch and stats.clip_fraction > self.limit:
            where = f"epoch {stats.epoch}, minibatch {stats.minibatch}"
            reason = f"clip fraction {stats.clip_fraction:.3f} over {self.limit} in {where}"
            module.control.skip_step(reason)
            module.control.stop_epochs(reason)

    def on_ppo_epoch_end(self, trainer: Trainer, module: ActorCriticModule, stats: EpochStats) -> None:
        if stats.clip_fraction > self.limit:
            reason = f"clip fraction {stats.clip_fraction:.3f} over {self.limit} in epoch {stats.epoch}"
            module.control.stop_epochs(reason)
