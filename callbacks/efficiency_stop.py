"""Stop a run that has converged."""

from __future__ import annotations

import math
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.module import ActorCriticModule


class EfficiencyStop(RLHFCallback):
    """Ends training once the reward no longer rises and the policy no longer moves.

    The means over the last ``window`` iterations are compared with those over the ``window`` before: the run ends if
    the score has risen by at most ``min_improvement`` and the KL to the reference changed by at most ``kl_tolerance``.
    While the policy still moves the run goes on, whatever the score does. An iteration in which score or KL was not
    measured is not counted.

    Args:
        window: iterations.
        min_improvement: a rise of ``reward/mean`` up to this counts as none.
        kl_tolerance: a change of ``kl/ref`` up to this counts as none.
        relative: ``min_improvement`` is a share of the score's gain since the run began, ``kl_tolerance`` a share of
            the KL, so that a slow run with small steps is not taken for a converged one; otherwise they are in the
            unit of the score and in nats per token.
    """

    def __init__(
        self, window: int = 20, min_improvement: float = 0.01, kl_tolerance: float = 0.01, relative: bool = True
    ) -> None:
        bounded("efficiency_stop", at_least=1, whole=True, window=window)
        bounded("efficiency_stop", above=0, min_improvement=min_improvement, kl_tolerance=kl_tolerance)
        self.window, self.min_improvement, self.kl_tolerance = window, min_improvement, kl_tolerance
        self.relative = relative
        self.scores: list[float] = []
        self.kls: list[float] = []
        self.start: float | None = None
        """Mean score of the first window."""

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        kl = 0.0 if module.reference is None else stats.kl_ref
        if not (math.isfinite(stats.score_mean) and math.isfinite(kl)):
            return
        keep = 2 * self.window
        self.scores = [*self.scores, stats.score_mean][-keep:]
        self.kls = [*self.kls, kl][-keep:]
        if len(self.scores) < keep:
            return
        if self.start is None:
            self.start = mean(self.scores[: self.window])
        gain, drift = change(self.scores), abs(change(self.kls))
        least, still = self.min_improvement, self.kl_tolerance
        if self.relative:
            least *= max(mean(self.scores[self.window :]) - self.start, 0.0)
            still *= abs(mean(self.kls))
        if gain <= least and drift <= still:
            module.control.stop_training(
                f"converged: over {self.window} iterations the mean score rose by {gain:.4f}, at most {least:.4f}, "
                f"and kl/ref moved by {drift:.4f}, at most {still:.4f}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores, "kls": self.kls, "start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores, self.kls = list(state_dict["scores"]), list(state_dict["kls"])
        self.start = state_dict.get("start", self.start)  # absent in checkpoints of earlier releases


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def change(values: list[float]) -> float:
    """Mean of the second half minus mean of the first."""
    half = len(values) // 2
    return (sum(values[half:]) - sum(values[:half])) / half
