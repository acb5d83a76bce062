"""The best score of a run so far and the KL it cost: by these a brake tells a collapse from learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.events import ExperienceStats

SMOOTHING = 0.7
"""Weight of the past in the averages of score and KL; the first averages are plain means of the values so far."""
MEMORY = 50
"""Iterations over which the best point is forgotten, so that harder prompts do not look like a fall for ever."""
LEAST = 1.0
"""Nats per response. Below it a policy has hardly left its reference, whatever the task."""


@dataclass
class Progress:
    """The best point of a run so far: its highest average score, and the KL to the reference there.

    A run that learns moves away from its reference, and how far it must go depends on the task. In a collapse the KL
    grows and the score does not. So the current KL is compared with the KL at the best score, and a fall of the score
    with the spread of the scores. Both scale with the task.

    It uses reduced numbers, the same on every rank; its state is plain numbers for a checkpoint.
    """

    seen: int = 0
    """Iterations observed."""
    score: float = 0.0
    """Average of ``reward/mean``."""
    kl: float = 0.0
    """Average of ``kl/ref``."""
    best: float = 0.0
    """The highest average score, slowly forgotten."""
    best_kl: float = 0.0
    """The average KL at that score."""
    spread: float = 0.0
    """The largest standard deviation of the scores of one iteration."""

    def observe(self, stats: ExperienceStats) -> bool:
        """Add the samples of one iteration; returns false and changes nothing if score or KL was not measured."""
        if not all(map(math.isfinite, (stats.score_mean, stats.score_std, stats.kl_ref))):
            return False
        self.seen += 1
        keep = min(SMOOTHING, 1.0 - 1.0 / self.seen)
        self.score = keep * self.score + (1.0 - keep) * stats.score_mean
        self.kl = keep * self.kl + (1.0 - keep) * stats.kl_ref
        self.spread = max(self.spread, stats.score_std)
        if self.seen == 1 or self.score >= self.best:
            self.best, self.best_kl = self.score, self.kl
        else:
            self.best += (self.score - self.best) / MEMORY
            self.best_kl += (self.kl - self.best_kl) / MEMORY
        return True

    def fall(self, score: float) -> float:
        """How far a score lies below the best average, in standard deviations of the scores (the largest seen)."""
        return (self.best - score) / self.spread if self.spread > 0 else 0.0

    def target(self, stats: ExperienceStats) -> float:
        """The KL at the best point, at least :data:`LEAST` per response; nats per token."""
        return max(self.best_kl, LEAST / max(stats.response_length_mean, 1.0))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
