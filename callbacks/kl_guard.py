"""The two-stage brake on the KL to the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback, needs_reference
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.events import ExperienceStats, MinibatchStats, UpdateStats
from lightning_rlhf.experience import Experience, PromptBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError


class KLGuard(RLHFCallback):
    """Brakes a policy that moves too far from the reference, softly first, then hard.

    With ``target`` null, the run itself sets it, see :class:`~lightning_rlhf.callbacks.progress.Progress`:
    the target is the KL at the best average score so far, and the score has *fallen* if its average lies ``fall``
    standard deviations below that best. A run whose score rises is never braked by its KL.

    ================  ==========================================  ==================================
    stage             target null: found in the run               target: a number
    ================  ==========================================  ==================================
    soft              fallen, and average KL over soft x target;  KL over soft x target
                      not fallen, and over hard x target
    hard, samples     fallen, and KL over hard x target           KL over hard x target
    hard, minibatch   KL(old || current) over jump                that, or KL over hard x target
    ================  ==========================================  ==================================

    Soft: the multiplier of the knob ``kl_coefficient`` grows by ``factor``; in an iteration below the soft limit it
    shrinks by it. It acts from the next iteration on and multiplies the value that the coefficient's owner has set.

    Hard, minibatch: the step is skipped, the actor's weights return to those before this iteration's update, and the
    epochs end. Hard, samples: the previous update went too far; it is undone, and these samples are not trained
    on. The critic and the optimiser's moments stay, so only the actor's weights are copied
    (``KLEarlyStop.rollback`` restores everything, for four times the memory or more). If the weights before the last
    update were over the limit already, only the soft stage acts: skipping every step would leave the run there.

    Tokens: a token whose log-ratio log(policy / reference) is over ``token_limit`` gets ``token_penalty`` as its reward
    instead of score and KL penalty. It is set after the normalisation of the scores, so it does not enter their
    statistics, and before the advantages.

    An iteration in which nothing was measured (every token rejected) changes nothing.

    Args:
        target: KL(current || reference), nats per token; ``None``: found in the run.
        soft, hard: multiples of the target where the two stages begin.
        factor: by which the multiplier of the coefficient grows and shrinks per iteration.
        max_multiplier: its bound.
        fall: standard deviations of the scores by which their average has fallen; twice that within one iteration
            counts as well, before the average follows.
        jump: KL(old || current) in nats per token that one update may reach. A ratio at the bound of PPO's usual clip
            range contributes 0.02; far beyond it the clipped objective has no meaning. ``None``: off.
        restore: the hard stage restores the actor; false only skips the step and ends the epochs, without a copy.
        token_limit: nats; ``None``: no token is penalised.
        token_penalty: replaces the reward of such a token.
        iterations: the guard acts in this many first iterations only; ``None``: in all.
    """

    def __init__(
        self,
        target: float | None = None,
        soft: float = 1.5,
        hard: float = 3.0,
        factor: float = 2.0,
        max_multiplier: float = 64.0,
        fall: float = 0.25,
        jump: float | None = 1.0,
        restore: bool = True,
        token_limit: float | None = None,
        token_penalty: float = -10.0,
        iterations: int | None = None,
    ) -> None:
        bounded("kl_guard", above=0, optional=True, target=target, jump=jump)
        bounded("kl_guard", above=0, soft=soft, hard=hard, fall=fall)
        bounded("kl_guard", above=1, factor=factor)
        bounded("kl_guard", at_least=1, max_multiplier=max_multiplier)
        bounded("kl_guard", above=0, optional=True, token_limit=token_limit)
        bounded("kl_guard", at_most=0, token_penalty=token_penalty)
        bounded("kl_guard", at_least=1, whole=True, optional=True, iterations=iterations)
        if soft > hard:
            raise SettingError("callbacks.kl_guard.soft", soft, f"at most callbacks.kl_guard.hard = {hard}")
        self.target, self.soft, self.hard = target, soft, hard
        self.factor, self.max_multiplier, self.fall, self.jump = factor, max_multiplier, fall, jump
        self.token_limit, self.token_penalty, self.iterations = token_limit, token_penalty, iterations
        self.restore = restore
        if restore:
            self.rollback_scopes = frozenset({"actor"})
        self.multiplier = 1.0
        self.calm = False
        """Whether the KL of the weights before the last update was measured, and below the hard limit."""
        self.progress = Progress()
        self._trouble: str | None = None
        """Why the coefficient is to grow after this iteration; ``None``: it shrinks."""
        self._measured = self._stepped = False
        self._kl_old = math.nan
        """KL(old || current) before the first step of the update, or where it was first measured."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.target is not None or self.token_limit is not None:
            needs_reference(pl_module, "kl_guard")

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        if not self._active(module):
            self.rollback_scopes = frozenset()  # no copy is needed from now on
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
        self._trouble, self._measured, self._stepped, self._kl_old = None, math.isfinite(stats.kl_ref), False, math.nan
        if not self._active(module) or not self._measured:
            return
        over = self._judge(stats) if self.target is None else self._compare(stats.kl_ref, self.target)
        if over and self.calm:
            self._brake_hard(module, over)
        else:
            self.calm = over is None

    def _judge(self, stats: ExperienceStats) -> str | None:
        """With target null: why the samples are over the hard limit, or ``None``; sets the soft stage."""
        progress = self.progress
        self._measured = progress.observe(stats)
        if not self._measured:
            return None
        target, average, lost = progress.target(stats), progress.fall(progress.score), progress.fall(stats.score_mean)
        where = f"{target:.4f} at the best score {progress.best:.3f}"
        if progress.kl > (self.soft if average > self.fall else self.hard) * target:
            state = f"{average:.2f} deviations under it" if average > self.fall else "and no better score since"
            self._trouble = f"kl/ref {progress.kl:.4f} after {where}, {state}"
        if stats.kl_ref > self.hard * target and (average > self.fall or lost > 2 * self.fall):
            return f"kl/ref {stats.kl_ref:.4f} over {self.hard} x {where}, score now {stats.score_mean:.3f}"
        return None

    def _compare(self, kl_ref: float, target: float) -> str | None:
        """With a given target: why a KL is over the hard limit, or ``None``; sets the soft stage."""
        if kl_ref > self.soft * target:
            self._trouble = f"kl/ref {kl_ref:.4f} over {self.soft} x {target}"
        return f"kl/ref {kl_ref:.4f} over {self.hard} x {target}" if kl_ref > self.hard * target else None

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        if not self._stepped or math.isnan(self._kl_old):
            self._kl_old = stats.kl_old
        elif self._active(module):
            over = self._too_far(stats)
            if over:
                module.control.skip_step(over)
                self._brake_hard(module, f"{over} in epoch {stats.epoch}, minibatch {stats.minibatch}")

    def _too_far(self, stats: MinibatchStats) -> str | None:
        """Why this update has gone too far, or ``None``."""
        if self.target is not None and self.calm and stats.kl_ref > self.hard * self.target:
            return f"kl/ref {stats.kl_ref:.4f} over {self.hard} x {self.target}"
        # Relative to the update's first kl/old, which is not 0 in bypass mode or with noise on hidden states.
        if self.jump is not None and stats.kl_old - self._kl_old > self.jump:
            return f"kl/old {stats.kl_old:.4f} over {self.jump} within one update"
        return None

    def on_minibatch_end(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        self._stepped |= stats.stepped
        if self.target is not None:
            self._compare(stats.kl_ref, self.target)

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        if not self._active(module) or not self._measured:
            return
        if self._trouble is None:
            self.multiplier = max(self.multiplier / self.factor, 1.0)
        elif self.multiplier < self.max_multiplier:
            self.multiplier = min(self.multiplier * self.factor, self.max_multiplier)
            module.control.note(
                "raise_kl_coefficient", f"{self._trouble}: times {self.multiplier:g}, less with every calm iteration"
            )

    def _active(self, module: ActorCriticModule) -> bool:
        return self.iterations is None or module.control.iteration <= self.iterations

    def _brake_hard(self, module: ActorCriticModule, reason: str) -> None:
        module.control.stop_epochs(reason)
        if self.restore:
            module.control.rollback(reason, to="actor")

    def state_dict(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier, "calm": self.calm, "progress": self.progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.multiplier, self.calm = state_dict["multiplier"], state_dict["calm"]
        self.progress.load_state_dict(state_dict.get("progress", {}))  # absent in earlier releases
