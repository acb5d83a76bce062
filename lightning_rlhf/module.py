"""The LightningModule of PPO: one ``training_step`` is one iteration, from prompts to updated weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lightning_rlhf.control import Control
from lightning_rlhf.data import check_room
from lightning_rlhf.distributed.parallel import agree_on_fields
from lightning_rlhf.distributed.processes import together
from lightning_rlhf.events import ExperienceStats, emit
from lightning_rlhf.experience import Experience, MiniBatch, PromptBatch, Rollout
from lightning_rlhf.functional.losses import PolicyLoss, ppo_policy_loss
from lightning_rlhf.generation import RolloutSource
from lightning_rlhf.logbook import Logbook
from lightning_rlhf.memory import OutOfMemory, attempt
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.experience import experience_numbers
from lightning_rlhf.metrics.groups import PromptGroups
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.models import Policy, SharedCritic
from lightning_rlhf.models.sharding import is_sharded
from lightning_rlhf.module_checkpoint import ModuleState
from lightning_rlhf.objective import micro_batch_loss
from lightning_rlhf.optimizer import default_group, make_optimizer, set_rates, take_settings
from lightning_rlhf.rewards import CompositeReward
from lightning_rlhf.rewards.safety import SafetyFilter, apply_safety
from lightning_rlhf.rewards.termination import drop_early
from lightning_rlhf.rollout import RolloutEngine
from lightning_rlhf.rollout.binding import end_tokens
from lightning_rlhf.scoring import compute_advantages, score_experience, score_rewards
from lightning_rlhf.screening import reply_tokens
from lightning_rlhf.settings import PPOSettings
from lightning_rlhf.update import UpdateLoop
from lightning_rlhf.validation import Evaluation


class PolicyOutput(NamedTuple):
    """What one forward pass of the actor says about the response tokens; every tensor is ``[B, R]`` float32."""

    logprobs: Tensor
    entropy: Tensor | None = None
    """Without a graph where ``module.loss.entropy_coefficient`` is 0; ``None`` leaves it out of metrics and stats."""
    values: Tensor | None = None
    """Only with a critic on the actor's trunk."""


class ActorCriticModule(LightningModule):
    """PPO with an actor, an optional critic and an optional reference model.

    Mixins and users override the extension points, and only those: :meth:`actor_logprobs`,
    :meth:`prepare_experience`, :meth:`policy_loss`, :meth:`extra_losses`, :meth:`parameter_groups`,
    :attr:`scores_old_policy`, :attr:`accepts_missing_logprobs` and :meth:`update_metrics`.

    Args:
        policy: actor, critic, reference and tokenizer, see :func:`lightning_rlhf.models.build_policy`.
        engine: generates responses, see :class:`lightning_rlhf.rollout.RolloutEngine`.
        reward: scores them.
        iterations: length of the run; the learning-rate schedule ends there.
        seed: of generation and of the minibatch permutations.
        update, advantage, termination, reward_processing, loss, kl, actor, critic, optimizer: blocks of settings, each
            a mapping or the dataclass of the same meaning in :mod:`lightning_rlhf.settings`.
        groups: block of :class:`lightning_rlhf.settings.PromptGroupSettings`, for data with ``group_column``.
        safety: block of :class:`lightning_rlhf.rewards.safety.SafetySettings`; ``None`` filters nothing.

    Raises:
        SettingError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        reward: CompositeReward,
        *,
        iterations: int,
        seed: int = 1,
        update: Mapping[str, Any] | None = None,
        advantage: Mapping[str, Any] | None = None,
        termination: Mapping[str, Any] | None = None,
        reward_processing: Mapping[str, Any] | None = None,
        loss: Mapping[str, Any] | None = None,
        kl: Mapping[str, Any] | None = None,
        actor: Mapping[str, Any] | None = None,
        critic: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        safety: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settings = PPOSettings.from_blocks(
            update=update,
            advantage=advantage,
            termination=termination,
            reward_processing=reward_processing,
            loss=loss,
            kl=kl,
            actor=actor,
            critic=critic,
            optimizer=optimizer,
            groups=groups,
        )
        self.iterations, self.seed = iterations, seed
        self.actor, self.critic, self.reference = policy.actor, policy.critic, policy.reference
        self.tokenizer = policy.tokenizer
        self.engine, self.reward = engine, reward
        self.safety = SafetyFilter.from_block(safety)
        self.safe_reply = reply_tokens(safety, policy.tokenizer, engine.sampling.max_new_tokens)
        """Tokens in place of an unsafe response; empty if none is replaced."""
        self.reward_moments = RunningMoments()
        self.groups = PromptGroups(self.settings)
        self.control = Control()
        self.control.register("kl_coefficient", self.settings.kl.coefficient)
        self.control.register("max_new_tokens", engine.sampling.max_new_tokens, minimum=1, integer=True)
        self.control.register("micro_batch_tokens", self.settings.update.micro_batch_tokens, minimum=1, integer=True)
        self.control.register("lr_scale", 1.0)
        self.run_config: dict[str, Any] | None = None
        """The resolved configuration as plain containers; travels in the checkpoint."""
        self.warm_up: dict[str, Any] | None = None
        """What was trained before PPO: supervised steps, peak learning rate, last loss; travels in the checkpoint."""
        self.last_evaluation: tuple[int, dict[str, float]] | None = None
        """The last evaluation on the held-out prompts: after which iteration, and its metrics."""
        self._rollouts = RolloutSource(self)
        self._evaluation = Evaluation(self, self._rollouts)
        self._update_loop = UpdateLoop(self)
        self._logbook = Logbook(self)
        self._state = ModuleState(self, self._update_loop, self._logbook, self._rollouts)

    # --- extension points ----------------------------------------------------------------------------------------

    def actor_logprobs(self, minibatch: MiniBatch) -> PolicyOutput:
        """Forward pass of the actor during an update; the numerator of the PPO ratio."""
        ids, mask = minibatch.concatenated()
        shared = isinstance(self.critic, SharedCritic)
        output = self.actor(
            ids,
            mask,
            minibatch.response_ids.shape[1],
            temperature=self.engine.sampling.temperature,
            entropy="gradient" if self.settings.loss.entropy_coefficient else "detached",
            with_hidden=shared,
        )
        values = self.critic(output.hidden)[:, :-1] if shared else None  # type: ignore[misc]
        return PolicyOutput(output.logprobs, output.entropy, values)

    def prepare_experience(self, experience: Experience) -> MetricBatch | None:
        """Called once the experience is scored and before advantages: rejection, importance weights, their metrics."""
        return None

    def policy_loss(self, minibatch: MiniBatch, logprobs: Tensor) -> PolicyLoss:
        """The clipped PPO objective (Schulman et al. 2017), weighted by ``is_weights`` where there are any."""
        loss = self.settings.loss
        return ppo_policy_loss(
            logprobs,
            minibatch.require("old_logprobs"),
            minibatch.require("advantages"),
            minibatch.require("loss_mask"),
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            weights=minibatch.is_weights,
            ratio_level=loss.ratio_level,
            scale=minibatch.scale,
        )

    def extra_losses(self, minibatch: MiniBatch) -> dict[str, Tensor]:
        """Further loss terms by metric name, weighted, and normalised so that micro-batches add up."""
        return {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Named optimiser groups: ``name, params, lr, weight_decay, clip_norm, warmup_iterations``."""
        parts = {"actor": (self.actor, self.settings.actor), "critic": (self.critic, self.settings.critic)}
        return [default_group(name, part, of) for name, (part, of) in parts.items() if part is not None]

    @property
    def scores_old_policy(self) -> bool:
        """Whether the trainer computes the old log-probabilities; if not, the engine's are used instead."""
        return True

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a response: those of the tokenizer, the model and its generation config."""
        return frozenset(end_tokens(self.actor.lm, self.tokenizer))

    @property
    def accepts_missing_logprobs(self) -> bool:
        """Whether tokens without a finite log-probability of the engine are handled; if not, they end the run."""
        return False

    def update_metrics(self) -> dict[str, float]:
        """Called once after the update: metrics collected during it, the same on every rank."""
        return {}

    # --- one iteration -------------------------------------------------------------------------------------------

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        """One iteration: rollout, rewards, scoring, advantages, update, weights to the engine, metrics."""
        log = self._logbook
        log.begin_iteration()
        self.control.begin_iteration(self.control.iteration + 1)
        self._set_logger_step(self.control.iteration)
        emit(self, "on_rollout_start", prompts)
        with log.timed("rollout"):
            rollout = self._rollouts.next(prompts)
        emit(self, "on_rollout_end", rollout)
        with log.timed("reward"):
            scored = partial(score_rewards, self.reward, self.tokenizer, prompts, rollout, self.end_ids)
            experience = together(scored)
        with log.timed("score"):
            self._score(experience)
            drop_early(experience, self.settings.termination)
            if self.safety is not None:
                apply_safety(experience, self.safety)
            metrics = self.prepare_experience(experience) or MetricBatch()
            emit(self, "on_experience_scored", experience)
            agree_on_fields(experience)
            beta = self.control.value("kl_coefficient")
            compute_advantages(experience, self.settings, beta, self.reward_moments, metrics, self.groups)
            self.groups.measure(experience, metrics)
        self._rollouts.measure(rollout, metrics)
        numbers = experience_numbers(experience, metrics)
        with self.control.allow("rollback"):
            emit(self, "on_experience_ready", experience, ExperienceStats.of(self.control.iteration, numbers))
        with log.timed("update"):
            update = self._update_loop.run(experience)
        with log.timed("rollout_wait"):
            self._rollouts.wait()
        with log.timed("weights"):
            self.engine.update_weights(self.control.iteration)
        numbers |= self._update_loop.metrics.compute() | self.update_metrics()
        numbers |= {"data/pass": max(prompts.passes), "rollout/drawn_late": float(self._rollouts.drawn_late)}
        log.write(numbers, update)
        self._obey_stop()

    def generate(self, prompts: PromptBatch, *, greedy: bool = False) -> Rollout:
        """Responses of the engine's policy, on the module's device."""
        return self._rollouts.generate(prompts, greedy=greedy)

    def probe(self, prompts: PromptBatch, *, max_new_tokens: int) -> tuple[Rollout, Tensor]:
        """One answer of the engine to each prompt, and the trainer's log-probabilities of its tokens.

        For callbacks that compare engine and trainer. The run's counters, random state and metrics do not change. Call
        it where the engine is idle: in ``on_rollout_start``, or outside of training.

        Args:
            prompts: the prompts to answer.
            max_new_tokens: longest answer; the limit of the rollouts stays in force.

        Returns:
            The rollout, and ``[B, R]`` float32 log-probabilities (nats), 0 on padding.
        """
        return self._rollouts.probe(prompts, max_new_tokens)

    def micro_batch_loss(self, micro: MiniBatch, metrics: MetricBatch) -> Tensor:
        """Loss of one micro-batch; the micro-batches of a minibatch add up to the minibatch's loss."""
        return micro_batch_loss(self, micro, metrics)

    # --- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Send the weights to the engine outside of training; in training it got them after the last update."""
        if self.trainer.state.fn != TrainerFn.FITTING or self.trainer.sanity_checking:
            self.engine.update_weights(self.control.iteration)
        self._set_logger_step(self.control.iteration)

    def on_validation_epoch_start(self) -> None:
        """Begin a new evaluation."""
        self._evaluation = Evaluation(self, self._rollouts)

    @torch.no_grad()
    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        """Greedy answers to held-out prompts, scored by every term of the reward (``eval/<term>``)."""
        self._evaluation.step(prompts)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all prompts of all ranks, and what callbacks report and decide on them."""
        numbers = self._evaluation.finish()
        self.log_dict(numbers)
        self.last_evaluation = self.control.iteration, numbers
        self._logbook.write_decisions()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._obey_stop()

    # --- optimiser -----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One fused AdamW with a named group per part, so that ``trainer.global_step`` counts PPO updates."""
        return make_optimizer(self.parameter_groups(), self.settings.optimizer)

    def set_learning_rates(self, progress: float, step: float) -> None:
        """Set each group's rate for the next optimiser step.

        Args:
            progress: iterations done plus the planned fraction of the current one. Epochs that end early and skipped
                steps do not move the schedule: ``progress`` jumps to the next iteration.
            step: what one optimiser step adds to ``progress``.
        """
        groups, scale = self.optimizers().param_groups, self.control.value("lr_scale")  # type: ignore[union-attr]
        set_rates(groups, self.settings.optimizer, scale, progress=progress, step=step, total=self.iterations)

    # --- Lightning hooks -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """The embedded engine shares the actor's weights from here on; reward models move to the device."""
        names = getattr(getattr(self.trainer, "datamodule", None), "groups", None)
        self.groups.take(getattr(names, "train", ()), getattr(names, "labels", {}))
        self.engine.setup(self.actor.lm, self.tokenizer)
        together(self._check_lengths)
        self.reward.to(self.trainer.strategy.root_device)  # the module itself moves there only after this
        if self.safety is not None:
            self.safety.to(self.trainer.strategy.root_device)

    def _check_lengths(self) -> None:
        """Check that prompts leave room for responses, if the engine knows its limit only after setup."""
        data, limit = getattr(self.trainer, "datamodule", None), self.engine.positions
        if limit is not None and hasattr(data, "train_prompts"):
            check_room(data, self.engine.sampling.max_new_tokens, limit, "the longest sequence of the engine")  # type: ignore[arg-type]

    def configure_model(self) -> None:
        """Shard actor, critic and reference if the strategy shards; later calls do nothing.

        They are built whole on the CPU of every rank. Converting the precision and computing the reference's
        fingerprint need the whole weights, so both come first.
        """
        sharding = getattr(self.trainer.strategy, "sharding", None)
        if sharding is None or is_sharded(self):
            return
        self.trainer.precision_plugin.convert_module(self)
        self._state.reference_fingerprint()
        for part in (self.actor, self.critic, self.reference):
            if isinstance(part, torch.nn.Module):
                sharding.shard(part)

    def teardown(self, stage: str) -> None:
        """End the thread of asynchronous rollouts."""
        self._rollouts.close()

    def on_fit_start(self) -> None:
        """Refuse asynchronous rollouts if the data module cannot return the next batch early."""
        self._rollouts.check()

    def on_train_start(self) -> None:
        """Replace the settings saved with a restored optimiser by those of this run's configuration."""
        groups: Any = self.optimizers().param_groups  # type: ignore[union-attr]
        take_settings(groups, self.parameter_groups(), self.settings.optimizer)
        self.engine.update_weights(self.control.iteration)
        self._set_logger_step(self.control.iteration + 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Control, counters and configuration; of a frozen reference only the fingerprint, its weights never change."""
        self._state.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what :meth:`on_save_checkpoint` saved; refuse a reference model that is not the same one."""
        self._state.load(checkpoint)

    def refuse_other_reference(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint trained against another reference model (:class:`InputError`); changes nothing."""
        self._state.refuse_other_reference(checkpoint["lightning_rlhf"])

    # --- helpers -------------------------------------------------------------------------------------------------

    def _score(self, experience: Experience) -> None:
        """Old and reference log-probabilities, entropy and values of every response token, without gradient.

        Raises:
            OutOfMemory: says which key to lower.
        """
        work = partial(
            score_experience,
            experience,
            self.actor,
            self.critic,
            self.reference,
            temperature=self.engine.sampling.temperature,
            budget=self.settings.update.score_tokens,
            old_policy=self.scores_old_policy,
        )
        _, error = attempt(work)
        if error:
            raise OutOfMemory(f"{error}: lower module.update.score_tokens = {self.settings.update.score_tokens}")

    def _obey_stop(self) -> None:
        """End the run after this iteration and its checkpoint, or as a failure, if a callback asked for that."""
        self.control.raise_if_failed()
        if self.control.training_stopped:
            self.trainer.should_stop = True

    def _set_logger_step(self, iteration: int) -> None:
        """Set the step that Lightning passes to loggers: it counts batches from 0, iterations count from 1."""
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = iteration
