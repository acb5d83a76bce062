"""Stop a run that has converged."""

from __future__ import annotations

from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.module import ActorCriticModule


class EfficiencyStop(RLHFCallback):
    """Ends training once the reward no longer rises and the policy no longer moves.

    The means over the last ``window`` iterations are compared with those over the ``window`` before: the score must
    have risen by less than ``min_improvement`` and the KL to the reference have changed by at most ``kl_tolerance``.
    A policy that still moves keeps the run alive, whatever the score does.

    Args:
        window: iterations.
        min_improvement: of ``reward/mean``, in its unit.
        kl_tolerance: change of ``kl/ref`` that still is flat, nats per token.
    """

    def __init__(self, window: int = 20, min_improvement: float = 0.01, kl_tolerance: float = 0.01) -> None:
        bounded("efficiency_stop", at_least=1, whole=True, window=window)
        bounded("efficiency_stop", above=0, min_improvement=min_improvement, kl_tolerance=kl_tolerance)
        self.window, self.min_improvement, self.kl_tolerance = window, min_improvement, kl_tolerance
        self.scores: list[float] = []
        self.kls: list[float] = []

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        keep = 2 * self.window
        self.scores = [*self.scores, stats.score_mean][-keep:]
        self.kls = [*self.kls, stats.kl_ref][-keep:]
        if len(self.scores) < keep:
            return
        gain, drift = _change(self.scores), abs(_change(self.kls))
        if gain < self.min_improvement and drift <= self.kl_tolerance:
            module.control.stop_training(
                f"converged: over {self.window} iterations the mean score rose by {gain:.4f}, less than "
                f"{self.min_improvement}, and kl/ref moved by {drift:.4f}, at most {self.kl_tolerance}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores, "kls": self.kls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores, self.kls = list(state_dict["scores"]), list(state_dict["kls"])


def _change(values: list[float]) -> float:
    """Mean of the second half minus mean of the first."""
    half = len(values) // 2
    return (sum(values[half:]) - sum(values[:half])) / half
