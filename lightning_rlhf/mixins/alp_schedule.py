"""How fast the noise of ALP is learned: frozen at first, then as KL and the variance of its gradient allow."""

from __future__ import annotations

import math
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.events import MinibatchStats
from lightning_rlhf.mixins.alp_settings import ALPSettings
from lightning_rlhf.models.perturbation import Perturbation, clamp_sigma_
from lightning_rlhf.models.router_perturbation import RouterPerturbation

GROUP = "alp"


class NoiseSchedule(Callback):
    """Learning rate and clip norm of the parameter group ``alp``, and the bounds of sigma.

    * For ``warmup_steps`` optimiser steps the rate is 0. Gradients are taken all the same: Adam's moments are warmed up
      when sigma starts to move, and every rank has a gradient for every parameter.
    * While the average of KL(old || perturbed current) is over ``kl_limit``, the rate shrinks by ``step`` per optimiser
      step down to ``min_lr_factor``; while it is not, it recovers as fast.
    * While the relative variance of the gradient's norm is over ``variance_limit``, the clip norm grows by ``step`` up
      to ``max_clip_norm``; while it is not, it returns to ``clip_norm``.

    The module adds it to the trainer's callbacks, where its state is saved with theirs. All its readings are reduced
    over ranks, so that ranks agree.
    """

    def __init__(
        self, settings: ALPSettings, perturbation: Perturbation, router: RouterPerturbation | None = None
    ) -> None:
        self._settings, self._perturbation, self._router = settings, perturbation, router
        self.lr_factor = 1.0
        self.clip_norm = settings.clip_norm
        self.epoch_began = False
        """Set at the start of every epoch; the code that reads it resets it."""
        self._averages: dict[str, float] = {}

    def rate(self, update: int) -> float:
        """Factor on the learning rate after ``update`` optimiser steps."""
        return 0.0 if update < self._settings.warmup_steps else self.lr_factor

    def on_ppo_epoch_start(self, trainer: Trainer, module: LightningModule, epoch: int) -> None:
        self.epoch_began = True

    def on_minibatch_end(self, trainer: Trainer, module: LightningModule, stats: MinibatchStats) -> None:
        """Adapt factor and clip norm to the stats; a reading that is not finite changes nothing."""
        if self._router is not None:
            self._router.finish_step(learned=stats.tokens > 0)
        if not stats.stepped:
            return
        for part in (self._perturbation, self._router):
            if part is not None:
                clamp_sigma_(part.log_sigma, *self._settings.sigma_bounds)
        norm = stats.grad_norms[GROUP]  # finite, as the step was taken
        mean, square = self._average("norm", norm), self._average("norm squared", norm * norm)
        grow = 1 + self._settings.step
        if math.isfinite(stats.kl_old):
            over = self._average("kl", stats.kl_old) > self._settings.kl_limit
            self.lr_factor *= 1 / grow if over else grow
            self.lr_factor = min(max(self.lr_factor, self._settings.min_lr_factor), 1.0)
        noisy = square - mean * mean > self._settings.variance_limit * mean * mean
        self.clip_norm *= grow if noisy else 1 / grow
        self.clip_norm = min(max(self.clip_norm, self._settings.clip_norm), self._settings.max_clip_norm)

    def _average(self, name: str, value: float) -> float:
        share = self._settings.smoothing
        self._averages[name] = share * self._averages.get(name, value) + (1 - share) * value
        return self._averages[name]

    def state_dict(self) -> dict[str, Any]:
        return {"lr_factor": self.lr_factor, "clip_norm": self.clip_norm, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr_factor, self.clip_norm = state_dict["lr_factor"], state_dict["clip_norm"]
        self._averages = dict(state_dict["averages"])
