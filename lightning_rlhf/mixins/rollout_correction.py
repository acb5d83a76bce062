"""Learn from samples of an engine that does not quite agree with the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.experience import Experience, MiniBatch
from lightning_rlhf.functional.correction import Correction, Plan, correct
from lightning_rlhf.functional.losses import PolicyLoss, reinforce_policy_loss
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.correction import CorrectionMetrics
from lightning_rlhf.metrics.correction_numbers import Numbers
from lightning_rlhf.mixins.adaptive_limits import AdaptiveLimits
from lightning_rlhf.mixins.correction_settings import BLOCK, RolloutCorrectionSettings, correction_settings
from lightning_rlhf.settings import SettingError

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

    Base = ActorCriticModule
else:
    Base = object


class RolloutCorrectionMixin(Base):
    """Importance weights, rejection and monitoring of the gap between engine and trainer; off while set to null.

    *Decoupled* (default): weights trainer / engine multiply the PPO loss, whose ratio is current / trainer before the
    update; rejected tokens and rows leave loss, group means, whitening and denominators. Advantages run over all
    response tokens, so a rejected last token keeps its outcome.

    *Bypass*: the engine's log-probabilities are the old ones and the trainer's are not computed. The ratio current /
    engine contains the correction; rejection depends on the current policy and is decided for each micro-batch.
    Rejected tokens leave every loss and metric of the update, but stay in the minibatch's denominators, which are
    counted before the first backward pass. A minibatch without an accepted token takes no step.

    Args:
        rollout_correction: settings, see :class:`RolloutCorrectionSettings`; ``None`` switches the mixin off.

    Raises:
        SettingError: a value is not allowed, or the engine reports no log-probabilities.
    """

    def __init__(self, *args: Any, rollout_correction: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._correction: _State | None = None
        settings = correction_settings(rollout_correction)
        if settings is None:
            return
        if not self.engine.reports_logprobs:
            given = type(self.engine).__name__
            raise SettingError(f"{BLOCK}", "on", f"null with the engine {given}, which reports no log-probabilities")
        self._correction = _State(settings, AdaptiveLimits(self.control, settings))

    @property
    def scores_old_policy(self) -> bool:
        """False in bypass mode: no forward pass is spent on old log-probabilities."""
        bypass = self._correction is not None and self._correction.settings.bypass_mode
        return super().scores_old_policy and not bypass

    @property
    def accepts_missing_logprobs(self) -> bool:
        """True: ``missing_logprobs`` decides how they are treated."""
        return super().accepts_missing_logprobs or self._correction is not None

    @property
    def tail_envelope(self) -> list[dict[str, float]]:
        """For figures: P2 and P98 of the log-ratio by token probability, from the last full set of metrics."""
        return [] if self._correction is None else self._correction.envelope

    def setup(self, stage: str) -> None:
        """Refuse an engine whose log-probabilities cannot be compared, and warn if they are biased."""
        super().setup(stage)
        if self._correction is not None:
            check_engine(self.engine, acts=self._correction.acts)

    def prepare_experience(self, experience: Experience) -> MetricBatch | None:
        """Weights and rejection (decoupled), or the engine's log-probabilities as the old ones (bypass)."""
        metrics = super().prepare_experience(experience)
        state = self._correction
        if state is None:
            return metrics
        state.begin(self.control.iteration)
        if state.settings.bypass_mode:
            bypass(experience, reject_rows=state.settings.missing_logprobs == "reject")
            return metrics
        train, rollout = experience.require("old_logprobs"), experience.rollout_logprobs
        correction = correct(train, rollout, experience.require("loss_mask"), state.plan)
        experience.loss_mask = correction.keep
        if correction.weights is not None:
            experience.is_weights = correction.weights.to(state.settings.storage)
        metrics = metrics or MetricBatch()
        for name, value in state.measure(correction, train, rollout).items():
            metrics.known(name, value)
        return metrics

    def policy_loss(self, minibatch: MiniBatch, logprobs: Tensor) -> PolicyLoss:
        """In bypass mode: rejection by current / engine, and REINFORCE if configured."""
        state = self._correction
        if state is None or not state.settings.bypass_mode:
            return super().policy_loss(minibatch, logprobs)
        train, mask = logprobs.detach(), minibatch.require("loss_mask")
        correction = correct(train, minibatch.rollout_logprobs, mask, state.plan)
        state.watch(correction, train, minibatch.rollout_logprobs)
        # Rejected tokens also leave the sequence ratio, a mean over accepted tokens.
        minibatch = replace(minibatch, loss_mask=correction.keep)
        if state.settings.loss_type == "ppo_clip":
            return super().policy_loss(minibatch, logprobs)._replace(accepted=correction.keep)
        loss = reinforce_policy_loss(
            logprobs,
            minibatch.rollout_logprobs,
            minibatch.require("advantages"),
            correction.keep,
            weights=correction.weights,
            scale=minibatch.scale,
        )
        return loss._replace(accepted=correction.keep)

    def update_metrics(self) -> dict[str, float]:
        """Metrics of bypass mode, where current / engine is known during the update only."""
        mine = {} if self._correction is None else self._correction.finish_update()
        return super().update_metrics() | mine

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Averages of the adaptive limits and the pending trigger, beside what the base class saves."""
        super().on_save_checkpoint(checkpoint)
        if self._correction is not None:
            checkpoint["lightning_rlhf"]["rollout_correction"] = self._correction.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them; if the checkpoint's run had no correction, the averages start afresh."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint["lightning_rlhf"].get("rollout_correction")
        if self._correction is not None and saved is not None:
            self._correction.load_state_dict(saved)


class _State:
    """State of the mixin: settings, the limits of this iteration, and the two tiers of metrics."""

    def __init__(self, settings: RolloutCorrectionSettings, limits: AdaptiveLimits) -> None:
        self.settings, self.limits = settings, limits
        self.plan: Plan = settings.plan
        self.envelope: list[dict[str, float]] = []
        self._full = False
        self._triggered = False
        self._watching: CorrectionMetrics | None = None

    @property
    def acts(self) -> bool:
        """Whether anything but metrics depends on the engine's log-probabilities."""
        plan = self.settings.plan
        rejects = bool(plan.rules) or plan.veto is not None
        return plan.level is not None or rejects or self.settings.bypass_mode

    def begin(self, iteration: int) -> None:
        """Fix the limits for one iteration, and which set of metrics is due."""
        self.plan = self.settings.plan.adjusted(self.limits.cap, self.limits.scale)
        self._full = self._triggered or (iteration - 1) % self.settings.full_every == 0
        self._triggered, self._watching = False, None

    def measure(self, correction: Correction, train: Tensor, rollout: Tensor) -> Numbers:
        """The metrics of a whole batch: the cheap set, or the full one if it is due or chi-square triggers it."""
        numbers: Numbers = {}
        if not self._full:
            numbers = _compute(CorrectionMetrics(), correction, train, rollout)
            self._full = self._trigger(numbers)
        if self._full:
            full = CorrectionMetrics(full=True)
            numbers = _compute(full, correction, train, rollout)
            self.envelope = full.tail_envelope
        self._observe(numbers)
        return numbers

    def watch(self, correction: Correction, train: Tensor, rollout: Tensor) -> None:
        """Add one micro-batch of an update to the metrics."""
        if self._watching is None:
            self._watching = CorrectionMetrics(full=self._full).to(train.device)
        self._watching.update(correction, train, rollout)

    def finish_update(self) -> Numbers:
        """The metrics of all micro-batches; a trigger applies to the next update, as this one is over."""
        if self._watching is None:
            return {}
        numbers = self._watching.compute()
        if self._full:
            self.envelope = self._watching.tail_envelope
        self._triggered = not self._full and self._trigger(numbers)
        self._watching = None
        self._observe(numbers)
        return numbers

    def _trigger(self, numbers: Numbers) -> bool:
        limit = self.settings.chi2_trigger
        return limit is not None and numbers.get("rollout_corr/chi2_token", 0.0) > limit

    def _observe(self, numbers: Numbers) -> None:
        self.limits.observe(
            numbers.get("rollout_corr/is_used_ess"), numbers.get("rollout_corr/rollout_rs_masked_fraction")
        )

    def state_dict(self) -> dict[str, Any]:
        return {"limits": self.limits.state_dict(), "triggered": self._triggered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.limits.load_state_dict(state["limits"])
        self._triggered = state["triggered"]


def _compute(metrics: CorrectionMetrics, correction: Correction, train: Tensor, rollout: Tensor) -> Numbers:
    metrics = metrics.to(train.device)
    metrics.update(correction, train, rollout)
    return metrics.compute()


@torch.no_grad()
def bypass(experience: Experience, *, reject_rows: bool) -> None:
    """Use the engine's log-probabilities as the old ones.

    A token without a finite one leaves the loss, with its whole row if ``reject_rows`` is true; there is no neutral
    substitute. The reference's log-probability is filled in, so that a KL penalty in the reward is 0 there.
    """
    rollout, mask = experience.rollout_logprobs, experience.require("loss_mask")
    missing = experience.response_mask & ~rollout.isfinite()
    stand_in = torch.zeros_like(rollout) if experience.ref_logprobs is None else experience.ref_logprobs
    mended = torch.where(missing, stand_in, rollout).masked_fill(~experience.response_mask, 0.0)
    experience.rollout_logprobs = experience.old_logprobs = mended
    gone = missing.any(-1, keepdim=True) if reject_rows else missing
    experience.loss_mask = mask & ~gone


def check_engine(engine: Any, *, acts: bool, block: str = BLOCK) -> None:
    """Refuse raw log-probabilities at a temperature other than 1, which cannot be corrected; warn of top-k and top-p.

    Args:
        engine: set up; ``describe()`` may say ``logprobs_mode`` (vLLM's word: ``raw_logprobs`` or
            ``processed_logprobs``).
        acts: whether the log-probabilities are used for more than metrics.
        block: configuration block that uses the log-probabilities.

    Raises:
        SettingError: the log-probabilities are of another distribution than the sampled one.
    """
    sampling = engine.sampling
    mode = str(engine.describe().get("logprobs_mode", "processed"))
    if not mode.startswith("processed") and sampling.temperature != 1.0:
        raise SettingError("rollout.logprobs_mode", mode, f"processed_logprobs with {block}: tokens are sampled at "
                           f"temperature {sampling.temperature:g} and reported as if it were 1")  # fmt: skip
    if sampling.truncated and acts:
        rank_zero_warn(
            f"{block}: rollout.top_k = {sampling.top_k}, rollout.top_p = {sampling.top_p} cut the distribution that is "
            "sampled from, the trainer scores over the whole vocabulary: every ratio is too low by the mass that was "
            "kept. Unbiased are rollout.top_k=0 rollout.top_p=1."
        )
