"""The two-stage brake on KL to the reference, for the start of training."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback, needs_reference
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats, MinibatchStats, UpdateStats
from lightning_rlhf.experience import Experience, PromptBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError


class KLGuard(RLHFCallback):
    """Brakes where the policy runs from the reference, softly first, then hard.

    Soft: in an iteration where ``kl/ref`` was over ``soft x target``, in the samples or in a minibatch, the multiplier
    of the knob ``kl_coefficient`` grows by ``factor``; in a calm one it shrinks by it. It acts from the next iteration
    on and multiplies whatever the coefficient's owner has set.

    Hard: a minibatch whose ``kl/ref`` is over ``hard x target`` before its step is skipped, the actor's weights return
    to those before this iteration's update, and the epochs end. Samples whose ``kl/ref`` is over it show that the last
    step of the update before went too far: it is undone and nothing is trained on them. The critic and the
    optimiser's moments stay, so the copy costs one actor's worth of memory (``KLEarlyStop.rollback`` restores
    everything, for four times the memory or more). A run that is over the limit with nothing to return to, because it
    began there, has the soft stage only: skipping every step would leave it there for good.

    Tokens: one whose log-ratio log(policy / reference) is over ``token_limit`` gets ``token_penalty`` as its reward
    instead of score and KL penalty, after the normalisation of the scores, whose statistics it therefore does not
    touch, and before advantages.

    Args:
        target: KL(current || reference), nats per token.
        soft, hard: multiples of the target where the two stages begin.
        factor: by which the multiplier of the coefficient grows and shrinks per iteration.
        max_multiplier: its bound.
        restore: the hard stage restores the actor; false only skips the step and ends the epochs, without a copy.
        token_limit: nats; ``None``: no token is penalised.
        token_penalty: replaces the reward of such a token.
        iterations: the guard acts in the first so many iterations; ``None``: in all.
    """

    def __init__(
        self,
        target: float = 0.1,
        soft: float = 1.5,
        hard: float = 3.0,
        factor: float = 2.0,
        max_multiplier: float = 8.0,
        restore: bool = True,
        token_limit: float | None = 0.5,
        token_penalty: float = -10.0,
        iterations: int | None = None,
    ) -> None:
        bounded("kl_guard", above=0, target=target, soft=soft, hard=hard)
        bounded("kl_guard", above=1, factor=factor)
        bounded("kl_guard", at_least=1, max_multiplier=max_multiplier)
        bounded("kl_guard", above=0, optional=True, token_limit=token_limit)
        bounded("kl_guard", at_most=0, token_penalty=token_penalty)
        bounded("kl_guard", at_least=1, whole=True, optional=True, iterations=iterations)
        if soft > hard:
            raise SettingError("callbacks.kl_guard.soft", soft, f"at most callbacks.kl_guard.hard = {hard}")
        self.target, self.soft, self.hard = target, soft, hard
        self.factor, self.max_multiplier, self.restore = factor, max_multiplier, restore
        self.token_limit, self.token_penalty, self.iterations = token_limit, token_penalty, iterations
        if restore:
            self.rollback_scopes = frozenset({"actor"})
        self.multiplier = 1.0
        self.calm = False
        """Whether the weights before the last update were seen to be under the hard limit."""
        self._worst = 0.0
        self._stepped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        needs_reference(pl_module, "kl_guard")

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        if not self._active(module):
            self.rollback_scopes = frozenset()  # no copy is needed any more
        elif self.multiplier > 1:
            module.control.scale("kl_coefficient", self.multiplier, by=type(self).__name__)

    def on_experience_scored(self, trainer: Trainer, module: ActorCriticModule, experience: Experience) -> None:
        if self.token_limit is None or not self._active(module):
            return
        over = experience.require("old_logprobs") - experience.require("ref_logprobs") > self.token_limit
        kept = experience.reward_override
        if kept is None:
            kept = torch.full_like(experience.require("old_logprobs"), math.nan)
        experience.reward_override = torch.where(over & experience.response_mask, self.token_penalty, kept)

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        self._worst, self._stepped = stats.kl_ref, False
        if not self._active(module):
            return
        over = stats.kl_ref > self.hard * self.target
        if over and self.calm:
            self._brake_hard(module, f"kl/ref {stats.kl_ref:.4f} of the samples")
        else:
            self.calm = not over

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        over = stats.kl_ref > self.hard * self.target
        if over and self._stepped and self.calm and self._active(module):
            module.control.skip_step(f"kl/ref {stats.kl_ref:.4f} over {self.hard} x {self.target}")
            self._brake_hard(module, f"kl/ref {stats.kl_ref:.4f} in epoch {stats.epoch}, minibatch {stats.minibatch}")

    def on_minibatch_end(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        self._worst = max(self._worst, stats.kl_ref)
        self._stepped |= stats.stepped

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        if not self._active(module):
            return
        if self._worst <= self.soft * self.target:
            self.multiplier = max(self.multiplier / self.factor, 1.0)
        elif self.multiplier < self.max_multiplier:
            self.multiplier = min(self.multiplier * self.factor, self.max_multiplier)
            reason = f"kl/ref {self._worst:.4f} over {self.soft} x {self.target}: times {self.multiplier:g} from now on"
            module.control.note("raise_kl_coefficient", reason)

    def _active(self, module: ActorCriticModule) -> bool:
        return self.iterations is None or module.control.iteration <= self.iterations

    def _brake_hard(self, module: ActorCriticModule, what: str) -> None:
        reason = f"{what} over {self.hard} x {self.target}"
        module.control.stop_epochs(reason)
        if self.restore:
            module.control.rollback(reason, to="actor")

    def state_dict(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier, "calm": self.calm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.multiplier, self.calm = state_dict["multiplier"], state_dict["calm"]
