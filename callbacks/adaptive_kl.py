"""Steer the KL coefficient towards a target KL."""

from __future__ import annotations

from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.events import ExperienceStats, UpdateStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.functional.kl import proportional_kl_update
from lightning_rlhf.module import ActorCriticModule


class AdaptiveKL(RLHFCallback):
    """Proportional controller of the knob ``kl_coefficient`` (Ziegler et al. 2019, arXiv 1909.08593).

    Once per iteration, from the globally reduced KL to the reference of that iteration's samples; the new value acts
    from the next iteration on. The coefficient is saved in checkpoints.

    Args:
        target: KL(current || reference) in nats per token.
        horizon: sequences over which a relative error of 1 would change the coefficient by its own size; the error
            is clipped to +-0.2.
    """

    def __init__(self, target: float = 0.05, horizon: int = 10_000) -> None:
        for name, value in (("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ValueError(f"callbacks.adaptive_kl.{name} = {value!r} is not allowed: a number > 0")
        self.target, self.horizon = target, horizon

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.control.own("kl_coefficient", type(self).__name__)  # type: ignore[union-attr, operator]

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        self._seen = stats

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        beta = module.control.knobs["kl_coefficient"].value
        kl, sequences = self._seen.kl_ref, self._seen.sequences
        updated = proportional_kl_update(beta, kl, target=self.target, horizon=self.horizon, steps=sequences)
        module.control.set("kl_coefficient", updated, type(self).__name__)
