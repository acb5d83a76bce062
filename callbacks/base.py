"""Base class of the kit's callbacks: Lightning's hooks plus the events of reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.control import Scope
from lightning_rlhf.events import EpochStats, EvaluationStats, ExperienceStats, MinibatchStats, UpdateStats
from lightning_rlhf.experience import Experience, MiniBatch, PromptBatch, Rollout
from lightning_rlhf.rewards import RewardBatch

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule


class RLHFCallback(Callback):
    """A callback with events for rollouts, PPO epochs and minibatches, which may decide through ``module.control``.

    Override what you need. Every ``stats`` object holds numbers already reduced over all ranks, so a decision taken
    on them is the same everywhere. A callback sees the module through events and ``module.control`` only.

    A number that was not measured is NaN: an iteration whose tokens were all rejected has no KL, nor has a run without
    reference. ``nan > limit`` is false, so a limit does not act on NaN; before averaging, counting or comparing with
    ``<`` test ``math.isfinite`` and skip NaN. Keep your state in ``state_dict``; ``template.py`` shows both.

    Example:
        >>> class StopWhenSolved(RLHFCallback):
        ...     def on_experience_ready(self, trainer, module, experience, stats):
        ...         if stats.score_mean > 0.99:
        ...             module.control.stop_training("solved: mean score over 0.99")
        >>> class EnoughOfThisBatch(RLHFCallback):
        ...     def on_ppo_epoch_end(self, trainer, module, stats):
        ...         if stats.clip_fraction > 0.3:
        ...             module.control.stop_epochs(f"clip fraction {stats.clip_fraction:.2f} over 0.3")
    """

    rollback_scopes: frozenset[Scope] = frozenset()
    """Scopes this callback may roll back to, see :data:`lightning_rlhf.control.SCOPES`.

    ``minibatch`` and ``iteration`` each cost a copy of the trained weights and the optimiser's state, ``actor`` a copy
    of the actor's weights. Read at the start of every update; no copy is made for a scope that no callback declares.
    """

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        """The prompts of the batch are known; generation has not begun."""

    def on_rollout_end(self, trainer: Trainer, module: ActorCriticModule, rollout: Rollout) -> None:
        """The responses are generated; scoring has not begun."""

    def on_experience_scored(self, trainer: Trainer, module: ActorCriticModule, experience: Experience) -> None:
        """Scores, log-probabilities, values are computed, advantages not. Set ``experience.reward_override`` here."""

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        """Scores, log-probabilities, values and advantages are computed; no update has begun.

        ``stop_epochs`` leaves the batch out; ``rollback(to="actor")`` undoes the update of the iteration before.
        """

    def on_ppo_epoch_start(self, trainer: Trainer, module: ActorCriticModule, epoch: int) -> None:
        """One pass over the experience begins."""

    def on_minibatch_start(self, trainer: Trainer, module: ActorCriticModule, minibatch: MiniBatch) -> None:
        """Before the forward pass of one minibatch."""

    def on_before_step(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        """Gradients and their norms are computed (not clipped), the step is not taken yet. ``skip_step`` acts here."""

    def on_minibatch_end(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        """The step was taken or skipped. ``rollback`` and ``stop_epochs`` act here."""

    def on_ppo_epoch_end(self, trainer: Trainer, module: ActorCriticModule, stats: EpochStats) -> None:
        """One pass over the experience ended; ``stop_epochs`` makes it the batch's last, ``rollback`` undoes it."""

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        """All epochs of this iteration have ended; the engine does not have the new weights yet."""

    def on_evaluation_scored(
        self, trainer: Trainer, module: ActorCriticModule, batch: RewardBatch, answers: Experience
    ) -> None:
        """A batch of held-out prompts is answered greedily and scored. Ranks have different numbers of batches."""

    def on_evaluation_end(self, trainer: Trainer, module: ActorCriticModule, stats: EvaluationStats) -> None:
        """All held-out answers of all ranks are scored; ``stop_training`` ends the run after its checkpoint."""


def needs_reference(module: LightningModule, callback: str) -> None:
    """Refuse a callback that watches the KL to the reference in a run without one: it would never act.

    Raises:
        ValueError: names the callback and the setting that is missing.
    """
    if module.reference is None:
        raise ValueError(
            f"callbacks.{callback} watches the KL to the reference model, and this run has none: "
            f"model.policy.reference=copy, or callbacks.{callback}=null"
        )
