"""Short responses first: the length limit grows over the first iterations."""

from __future__ import annotations

import math
from typing import Any

from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience, PromptBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError

GROWTH = 1.5
"""Factor by which the limit grows at once if it truncates too many responses."""


class LengthCurriculum(RLHFCallback):
    """Owner of the knob ``max_new_tokens``: linear growth from ``start`` to ``rollout.max_new_tokens``.

    Early in training every token adds to the KL of its sequence; short responses bound that KL. A limit that
    truncates answers would teach to write truncated ones, so it grows faster if it does. The soft overlong penalty
    (``module.termination.truncated=soft_overlong``) follows: its L_max is the limit that a response was drawn under.

    Args:
        start: the limit in the first iteration: tokens (a whole number), or a share of the full length (below 1).
        iterations: the full length is reached in the iteration after these, or sooner.
        max_truncated: after an iteration in which a larger share of the responses was truncated the limit grows by half
            at once. ``None``: by the iteration alone.
    """

    def __init__(self, start: float = 0.25, iterations: int = 20, max_truncated: float | None = 0.1) -> None:
        share = isinstance(start, float) and start < 1
        if share:
            bounded("length_curriculum", above=0, start=start)
        else:
            bounded("length_curriculum", at_least=1, whole=True, start=start)
        bounded("length_curriculum", at_least=1, whole=True, iterations=iterations)
        bounded("length_curriculum", above=0, below=1, optional=True, max_truncated=max_truncated)
        self.start, self.iterations, self.max_truncated = start, iterations, max_truncated
        self.first = self.full = 1
        """Limits in tokens: the first and the full one."""
        self.least = 0
        """Lower bound of the limit, in tokens; it never falls."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        control = pl_module.control
        control.own("max_new_tokens", type(self).__name__)  # type: ignore[union-attr, operator]
        self.full = pl_module.engine.sampling.max_new_tokens  # type: ignore[union-attr, assignment]
        self.first = math.ceil(self.start * self.full) if self.start < 1 else int(self.start)
        if self.first > self.full:
            allowed = f"at most rollout.max_new_tokens = {self.full}"
            raise SettingError("callbacks.length_curriculum.start", self.start, allowed)

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        grown = min((module.control.iteration - 1) / self.iterations, 1.0)
        length = max(round(self.first + grown * (self.full - self.first)), self.least)
        module.control.set("max_new_tokens", length, type(self).__name__)

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        length, limit = int(module.control.knobs["max_new_tokens"].value), self.max_truncated
        if limit is not None and stats.truncated_fraction > limit and length < self.full:
            self.least = min(math.ceil(GROWTH * length), self.full)
            reason = (
                f"{stats.truncated_fraction:.0%} cut at {length} tokens, over {limit:.0%}: at least {self.least} now"
            )
            module.control.note("lengthen_responses", reason)

    def state_dict(self) -> dict[str, Any]:
        return {"least": self.least}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.least = state_dict["least"]
