"""Do not train on a batch without a learning signal."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.module import ActorCriticModule

MEMORY = 50
"""Number of recent batches whose median is the usual mean |advantage|."""


class AdvantageVanish(RLHFCallback):
    """Skips the update of a batch whose advantages are all close to 0: the policy would learn only noise from it.

    Decides by ``advantage/raw_abs_mean``, **before** whitening, which scales noise to the size of a signal. Z-scored
    rewards (``module.reward_processing.normalise``) and groups divided by their deviation have unit size by
    construction; there the mean falls below the threshold only if (nearly) all scores are equal.

    A batch without a valid token is ignored.

    Args:
        threshold: of the mean |advantage|.
        relative: the threshold is a share of the median over the last :data:`MEMORY` batches that were trained on,
            and so independent of the reward's scale; otherwise it is in the unit of the reward.
    """

    def __init__(self, threshold: float = 0.01, relative: bool = True) -> None:
        bounded("advantage_vanish", above=0, threshold=threshold)
        self.threshold, self.relative = threshold, relative
        self.sizes: list[float] = []
        """Mean |advantage| of the batches that were trained on, newest last."""

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        size = stats.advantage_raw_abs_mean
        if not math.isfinite(size):
            return
        usual = statistics.median(self.sizes) if self.sizes else 0.0
        limit = self.threshold * usual if self.relative else self.threshold
        if size < limit or size == 0:
            of = f"{self.threshold:g} x {usual:.2g}, the usual" if self.relative else f"{self.threshold}"
            reason = f"mean |advantage| {size:.2g} under {of}" if size else "all advantages are 0: scores are all equal"
            module.control.stop_epochs(reason)
        else:
            self.sizes = [*self.sizes, size][-MEMORY:]

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sizes = list(state_dict["sizes"])
