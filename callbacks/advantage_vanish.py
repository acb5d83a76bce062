"""Do not train on a batch that has nothing to say."""

from __future__ import annotations

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.module import ActorCriticModule


class AdvantageVanish(RLHFCallback):
    """Skips the update of a batch whose advantages are all close to 0: only noise would be learnt from it.

    Judged on ``advantage/raw_abs_mean``, **before** whitening, which brings noise to the size of a signal. Rewards that
    are z-scored (``module.reward_processing.normalise``) and groups that are divided by their deviation have unit size
    by construction; there the mean falls under the threshold only where (nearly) all scores are equal.

    Args:
        threshold: of the mean |advantage|, in units of the reward that advantages are computed from.
    """

    def __init__(self, threshold: float = 0.01) -> None:
        bounded("advantage_vanish", above=0, threshold=threshold)
        self.threshold = threshold

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        if stats.advantage_raw_abs_mean < self.threshold:
            module.control.stop_epochs(f"mean |advantage| {stats.advantage_raw_abs_mean:.2g} under {self.threshold}")
