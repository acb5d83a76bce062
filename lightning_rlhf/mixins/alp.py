"""Learn under noise: adaptive layerwise perturbation (ALP, arXiv 2603.19470)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.experience import Experience, MiniBatch
from lightning_rlhf.functional.losses import PolicyLoss
from lightning_rlhf.functional.stats import all_reduce_max
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.mixins.alp_comparison import PolicyComparison, RatioTails
from lightning_rlhf.mixins.alp_schedule import GROUP, NoiseSchedule
from lightning_rlhf.mixins.alp_settings import BLOCK, ALPSettings, alp_settings
from lightning_rlhf.mixins.rollout_correction import check_engine
from lightning_rlhf.models.perturbation import Perturbation
from lightning_rlhf.models.router_perturbation import RouterPerturbation
from lightning_rlhf.settings import SettingError

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule, PolicyOutput

    Base = ActorCriticModule
else:
    Base = object


class ALPMixin(Base):
    """Noise on the hidden states in the forward passes of updates, and only there; off while its block is null.

    The perturbed policy is the numerator of the PPO ratio. The denominator is the engine's probability (``unified``:
    one ratio covers staleness and the gap between engine and trainer) or the trainer's before the update
    (``decoupled``). Generation, old and reference log-probabilities, evaluation and the weights sent to the engine or
    exported are those of the plain policy.

    Args:
        alp: settings, see :class:`ALPSettings`; ``None`` switches the mixin off.

    Attributes:
        perturbation: the standard deviations of the layers; saved in checkpoints, never exported with the weights.
        router_perturbation: those of the routers of a mixture of experts.

    Raises:
        SettingError: a value is not allowed, or the engine reports no log-probabilities to divide by.
        ValueError: the decoder layers or the routers of the model cannot be found.
    """

    def __init__(self, *args: Any, alp: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.perturbation: Perturbation | None = None
        self.router_perturbation: RouterPerturbation | None = None
        self._alp: _State | None = None
        settings = alp_settings(alp)
        if settings is None:
            return
        if settings.ratio == "unified" and not self.engine.reports_logprobs:
            engine = type(self.engine).__name__
            raise SettingError(f"{BLOCK}.ratio", "unified", f"decoupled: {engine} reports no log-probabilities")
        lm: Any = self.actor.lm
        self.perturbation = Perturbation(
            lm,
            init_sigma=settings.init_sigma,
            granularity=settings.granularity,
            layers=settings.layers,
            layer_range=settings.layer_range,
            bits=settings.quantise_bits,
            seed=self.seed,
        )
        if settings.router is not None:
            self.router_perturbation = RouterPerturbation(
                lm, self.perturbation, init_sigma=settings.router.init_sigma, target=settings.router.target
            )
        self._alp = _State(settings, NoiseSchedule(settings, self.perturbation, self.router_perturbation))

    # --- extension points --------------------------------------------------------------------------------------------

    def actor_logprobs(self, minibatch: MiniBatch) -> PolicyOutput:
        """Forward pass of the perturbed policy; at times also of the plain one, for comparison."""
        state = self._alp
        if state is None or self.perturbation is None:
            return super().actor_logprobs(minibatch)
        part, mask = state.next_part(self.control.iteration), minibatch.concatenated()[1]
        with self.perturbation.noise(step=self.control.iteration, part=part, rank=self.global_rank, mask=mask):
            output = super().actor_logprobs(minibatch)
        if state.compares(self.control.iteration):
            with torch.no_grad():
                plain = super().actor_logprobs(minibatch)
            state.comparison.add(minibatch, output.logprobs, plain.logprobs)
        return output

    @property
    def accepts_missing_logprobs(self) -> bool:
        """True for ``unified``: such tokens leave the loss."""
        return super().accepts_missing_logprobs or self._unified

    def prepare_experience(self, experience: Experience) -> MetricBatch | None:
        """Unified: tokens whose engine log-probability is missing leave the loss; weights on top are refused."""
        metrics = super().prepare_experience(experience)
        if self._unified:
            if experience.is_weights is not None:
                raise SettingError(f"{BLOCK}.ratio", "unified", "decoupled where importance weights are on: the ratio "
                                   "perturbed current / engine contains them already")  # fmt: skip
            experience.loss_mask = experience.require("loss_mask") & experience.rollout_logprobs.isfinite()
        return metrics

    def policy_loss(self, minibatch: MiniBatch, logprobs: Tensor) -> PolicyLoss:
        """Unified: the engine's log-probabilities replace the old ones."""
        if self._unified:
            minibatch = replace(minibatch, old_logprobs=minibatch.rollout_logprobs)
        return super().policy_loss(minibatch, logprobs)

    def extra_losses(self, minibatch: MiniBatch) -> dict[str, Tensor]:
        """Balance loss of the experts in each micro-batch, weighted by its accepted share of the minibatch's tokens."""
        losses = super().extra_losses(minibatch)
        if self._alp is not None and self.router_perturbation is not None and self._alp.settings.router is not None:
            share = minibatch.require("loss_mask").sum() / max(minibatch.tokens, 1.0)
            losses["alp/balance_loss"] = self._alp.settings.router.balance * share * self.router_perturbation.balance()
        return losses

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Add the parameter group ``alp``."""
        groups = super().parameter_groups()
        if self._alp is not None:
            parts = (self.perturbation, self.router_perturbation)
            groups.append(
                {
                    "name": GROUP,
                    "params": [part.log_sigma for part in parts if part is not None],
                    "lr": self._alp.settings.lr,
                    "weight_decay": 0.0,
                    "clip_norm": self._alp.schedule.clip_norm,
                    "warmup_iterations": 0,
                }
            )
        return groups

    def update_metrics(self) -> dict[str, float]:
        """Sigma of every layer, its learning-rate factor and clip norm, and the last comparison."""
        numbers = super().update_metrics()
        state = self._alp
        if state is None or self.perturbation is None:
            return numbers
        for index, sigma in zip(self.perturbation.indices, self.perturbation.sigmas().tolist(), strict=True):
            numbers[f"alp/sigma_layer_{index:02d}"] = sigma
        numbers |= {
            "alp/lr_factor": state.schedule.rate(self.control.update),
            "alp/clip_norm": state.schedule.clip_norm,
        }
        router = self.router_perturbation
        if router is not None:
            for index, sigma in zip(router.indices, router.sigmas().tolist(), strict=True):
                numbers[f"alp/sigma_router_{index:02d}"] = sigma
            numbers["alp/utilisation_max"] = float(router.utilisation.max())
        return numbers | state.finish_comparison()

    # --- the optimiser -----------------------------------------------------------------------------------------------

    def set_learning_rates(self, progress: float, step: float) -> None:
        """Set the rates of all groups, then scale rate and clip norm of ``alp`` by :class:`NoiseSchedule`."""
        super().set_learning_rates(progress, step)
        if self._alp is not None:
            for group in self.optimizers().param_groups:  # type: ignore[union-attr]
                if group["name"] == GROUP:
                    group["lr"] *= self._alp.schedule.rate(self.control.update)
                    group["clip_norm"] = self._alp.schedule.clip_norm

    def configure_callbacks(self) -> list[Callback]:
        """Add the noise's schedule, a callback with events for every minibatch."""
        callbacks = list(super().configure_callbacks())  # type: ignore[arg-type]
        trainer: Any = self.trainer
        if self._alp is None or self._alp.schedule in trainer.callbacks:
            return callbacks  # already there from an earlier stage; Lightning would log a replacement
        return [*callbacks, self._alp.schedule]

    # --- checks and figures ------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Unified: refuse an engine whose log-probabilities cannot be compared, warn if they are biased."""
        super().setup(stage)
        if self._unified:
            check_engine(self.engine, acts=True, block=BLOCK)

    def on_train_start(self) -> None:
        """Warn where noise would be rounded away."""
        super().on_train_start()
        dtype = self.actor.lm.dtype
        if self._alp is not None and torch.finfo(dtype).bits < 32 and 0 < self._alp.settings.init_sigma < 1e-2:
            rank_zero_warn(
                f"{BLOCK}: hidden states are {dtype}, with steps of {torch.finfo(dtype).eps:.0e} of a number: noise of "
                f"init_sigma = {self._alp.settings.init_sigma:g} is mostly rounded away. trainer=bf16 (bf16-mixed) "
                "keeps them in float32"
            )

    def sigma_difference(self) -> float:
        """Largest difference of a log sigma between two ranks; it must be 0. To be called on every rank."""
        parts = [part.log_sigma.detach().flatten() for part in (self.perturbation, self.router_perturbation) if part]
        if not parts:
            return 0.0
        flat = torch.cat(parts)
        flat = flat[flat.isfinite()].double()  # a sigma of 0 is 0 on every rank
        if not flat.numel():
            return 0.0
        return float((all_reduce_max(flat) + all_reduce_max(-flat)).max())

    def sigma_by_layer(self) -> dict[int, float]:
        """For figures: layer number -> standard deviation of its noise."""
        if self.perturbation is None:
            return {}
        return dict(zip(self.perturbation.indices, self.perturbation.sigmas().tolist(), strict=True))

    @property
    def ratio_tails(self) -> list[RatioTails]:
        """For figures: tails of the ratio by token probability, with and without noise, at the last comparison."""
        return [] if self._alp is None else self._alp.tails

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how far sigma differs between ranks, and warn if it does."""
        super().on_save_checkpoint(checkpoint)
        if self._alp is not None:
            difference = self.sigma_difference()
            checkpoint["lightning_rlhf"]["alp"] = {"sigma_difference": difference}
            if difference != 0:
                rank_zero_warn(
                    f"{BLOCK}: log sigma differs by {difference:.3g} between ranks; it must be the same on all"
                )

    @property
    def _unified(self) -> bool:
        return self._alp is not None and self._alp.settings.ratio == "unified"


@dataclass
class _State:
    """State of the mixin beside the parameters; of its measurements only ``tails`` (for figures) is kept longer."""

    settings: ALPSettings
    schedule: NoiseSchedule
    comparison: PolicyComparison = field(default_factory=PolicyComparison)
    tails: list[RatioTails] = field(default_factory=list)
    _iteration: int = -1
    _parts: int = 0

    def next_part(self, iteration: int) -> int:
        """The number of the next forward pass of an iteration; repeated passes are counted again."""
        self._parts = self._parts + 1 if iteration == self._iteration else 0
        self._iteration = iteration
        return self._parts

    def compares(self, iteration: int) -> bool:
        """Whether to run the plain policy, too: in the first micro-batch of an epoch, if a comparison is due."""
        due = self.schedule.epoch_began and (iteration - 1) % self.settings.compare_every == 0
        self.schedule.epoch_began = False
        return due

    def finish_comparison(self) -> dict[str, float]:
        """The metrics of this iteration's comparisons; empty without one."""
        if not len(self.comparison):
            return {}
        numbers, self.tails = self.comparison.metrics(), self.comparison.tails()
        self.comparison = PolicyComparison()
        return numbers
