"""A callback to copy: watches one number, decides with a reason, keeps its state across a resume, checks its settings.

Copy this file into the folder you start from, rename the class, and add it to a run:
``+callbacks.solved._target_=my_parts.StopWhenSolved +callbacks.solved.score=0.95``.
"""

from __future__ import annotations

import math
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.module import ActorCriticModule


class StopWhenSolved(RLHFCallback):
    """Ends the run once the mean score was over a threshold in some iterations in a row.

    Args:
        score: threshold of ``reward/mean``.
        patience: iterations in a row.
    """

    def __init__(self, score: float = 0.99, patience: int = 3) -> None:
        # 1. Refuse invalid settings here, before anything starts; name the key, its value and what is allowed.
        bounded("template", above=0, score=score)
        bounded("template", at_least=1, whole=True, patience=patience)
        self.score, self.patience = score, patience
        self.solved = 0

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        # 2. Decide by `stats` alone: its numbers are reduced over all ranks, so every rank decides the same. A number
        #    that was not measured is NaN (no valid token, no reference): skip it, and keep your counts.
        if not math.isfinite(stats.score_mean):
            return
        self.solved = self.solved + 1 if stats.score_mean > self.score else 0
        if self.solved >= self.patience:
            # 3. Act through module.control. The reason is logged, shown in MLflow and printed at the end. To end the
            #    epochs of a batch, call module.control.stop_epochs(reason) in on_ppo_epoch_end instead.
            module.control.stop_training(f"mean score over {self.score} in {self.solved} iterations in a row")

    # 4. State kept from one iteration to the next belongs in the checkpoint: plain numbers, lists, tensors.
    def state_dict(self) -> dict[str, Any]:
        return {"solved": self.solved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.solved = state_dict["solved"]
