"""Settings of rollout correction. Key names are veRL's (second era) where veRL has the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from lightning_rlhf.bounds import bounded, is_number
from lightning_rlhf.functional.correction import Missing, Plan, WeightLevel, WeightMode, storage_error
from lightning_rlhf.functional.rejection import Rule, parse_rules
from lightning_rlhf.settings import SettingError, build

BLOCK = "module.rollout_correction"
STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_STORAGE_ERROR = 1e-3
"""Largest change of a weight by rounding."""


@dataclass(frozen=True)
class AdaptiveSettings:
    """Limits that follow the data: the cap of the weights and the width of the rejection bands."""

    target_ess: float | None = None
    """Effective sample size of the weights in use (1 is all of it); the cap falls while it is lower. Null: fixed."""
    target_rejection: float | None = None
    """Share of valid tokens that rejection may take; bands widen while it takes more. Null: fixed bands."""
    step: float = 0.1
    """Largest change of the log of a limit from one iteration to the next."""
    smoothing: float = 0.8
    """Weight of the past in the controllers' averages, per iteration; 0 uses the last iteration alone."""
    threshold_bounds: tuple[float, float] = (1.1, 10.0)
    """Lower and upper bound of the cap."""
    scale_bounds: tuple[float, float] = (0.25, 4.0)
    """Bands stay between these multiples of their configured width (in log-ratio, or in nats of divergence)."""

    def __post_init__(self) -> None:
        block = f"{BLOCK}.adaptive"
        for name in ("target_ess", "target_rejection"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < 1):
                raise SettingError(f"{block}.{name}", value, "a number between 0 and 1, or null")
        if not (is_number(self.step) and 0 < self.step <= 1):
            raise SettingError(f"{block}.step", self.step, "a number in (0, 1]")
        if not (is_number(self.smoothing) and 0 <= self.smoothing < 1):
            raise SettingError(f"{block}.smoothing", self.smoothing, "a number in [0, 1)")
        for name in ("threshold_bounds", "scale_bounds"):
            bounds = getattr(self, name)
            if not isinstance(bounds, Sequence) or len(bounds) != 2 or not all(map(is_number, bounds)):
                raise SettingError(f"{block}.{name}", bounds, "two numbers, lowest and highest")
            if not 0 < bounds[0] <= bounds[1]:
                raise SettingError(f"{block}.{name}", bounds, "two numbers > 0, the lowest first")
            object.__setattr__(self, name, tuple(float(bound) for bound in bounds))


@dataclass(frozen=True)
class RolloutCorrectionSettings:
    """Everything about the gap between engine and trainer; see docs/rollout-correction.md."""

    rollout_is: WeightLevel | None = None
    """Importance weights: token, sequence (product over the row), geometric (its geometric mean); null: none."""
    rollout_is_threshold: float = 2.0
    """Largest weight (a ratio)."""
    rollout_is_mode: WeightMode = "truncate"
    """truncate: weights above the threshold become the threshold; mask: weights outside the band become 0."""
    rollout_is_threshold_lower: float | None = None
    """mask only: smallest weight that is not masked; null: 1 / threshold."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over what was accepted, on all ranks, then cap them again."""
    rollout_is_dtype: str = "float32"
    """What weights are stored in; float16 halves their memory and is refused where it may change one by over 1e-3."""
    rollout_rs: str | Sequence[str] | None = None
    """Rejection: token, sequence, geometric, or veRL's token_k1 ... seq_max_k3, several by commas; null: none."""
    rollout_rs_threshold: float | str | Sequence[float | str] | None = None
    """Bound of each rule: of a ratio (a number, or "lower_upper"), of k2 and k3 a divergence in nats."""
    rollout_rs_threshold_lower: float | None = None
    """Lower bound of a ratio given as one number; null: 1 / threshold."""
    rollout_token_veto_threshold: float | None = None
    """A sequence with a token whose ratio is below this is rejected as a whole; null: no veto."""
    missing_logprobs: Missing = "neutral"
    """Tokens whose engine log-probability is NaN or infinite: ratio 1 (neutral), or drop the sequence (reject)."""
    bypass_mode: bool = False
    """The engine's log-probabilities are the old ones; the trainer's are not computed."""
    loss_type: str = "ppo_clip"
    """bypass only: ppo_clip (ratio current / engine, no weights on top) or reinforce (weights current / engine)."""
    full_every: int = 10
    """Iterations between two full sets of metrics; the cheap ones are logged every iteration."""
    chi2_trigger: float | None = 1.0
    """A token chi-square above this triggers the full set at once; null: never."""
    adaptive: AdaptiveSettings = field(default_factory=AdaptiveSettings)
    """Limits that follow the data."""

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, AdaptiveSettings):
            object.__setattr__(self, "adaptive", build(AdaptiveSettings, f"{BLOCK}.adaptive", self.adaptive))
        self._check_values()
        rules = self._rules()
        self._check_modes()
        self._check_storage()
        object.__setattr__(self, "_parsed", rules)

    @property
    def plan(self) -> Plan:
        """Input of the pure functions, with the configured limits."""
        return Plan(
            level=self.rollout_is,
            cap=float(self.rollout_is_threshold),
            floor=self.rollout_is_threshold_lower,
            mode=self.rollout_is_mode,
            normalise=self.rollout_is_batch_normalize,
            rules=self._parsed,  # type: ignore[attr-defined]
            veto=self.rollout_token_veto_threshold,
            missing=self.missing_logprobs,
        )

    @property
    def storage(self) -> torch.dtype:
        return STORAGE[self.rollout_is_dtype]

    @property
    def largest_cap(self) -> float:
        """The largest cap that can be used."""
        steered = self.adaptive.target_ess is not None
        return self.adaptive.threshold_bounds[1] if steered else float(self.rollout_is_threshold)

    def _check_values(self) -> None:
        words = {
            "rollout_is": (*get_args(WeightLevel), None),
            "rollout_is_mode": get_args(WeightMode),
            "rollout_is_dtype": tuple(STORAGE),
            "missing_logprobs": get_args(Missing),
            "loss_type": ("ppo_clip", "reinforce"),
        }
        for name, allowed in words.items():
            value = getattr(self, name)
            if not any(value is word or (isinstance(word, str) and value == word) for word in allowed):
                shown = ", ".join("null" if word is None else str(word).lower() for word in allowed)
                raise _refused(name, value, f"one of {shown}")
        for name in ("rollout_is_threshold", "rollout_is_threshold_lower", "chi2_trigger"):
            value = getattr(self, name)
            if not (value is None and name != "rollout_is_threshold") and not (is_number(value) and value > 0):
                raise _refused(name, value, "a finite number > 0")
        veto = self.rollout_token_veto_threshold
        if veto is not None and not (is_number(veto) and 0 < veto < 1):
            raise _refused("rollout_token_veto_threshold", veto, "a ratio between 0 and 1, or null")
        bounded(BLOCK, at_least=1, whole=True, full_every=self.full_every)

    def _rules(self) -> tuple[Rule, ...]:
        try:
            return parse_rules(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        except SettingError as error:
            raise _refused(error.key, error.value, error.allowed) from None

    def _check_modes(self) -> None:
        lower, upper = self.rollout_is_threshold_lower, self.rollout_is_threshold
        if lower is not None and self.rollout_is_mode != "mask":
            raise _refused("rollout_is_threshold_lower", lower, "null where rollout_is_mode is truncate: weights have "
                           "no lower cap")  # fmt: skip
        if self.rollout_is_mode == "mask" and (1 / upper if lower is None else lower) > upper:
            name, value = ("rollout_is_threshold", upper) if lower is None else ("rollout_is_threshold_lower", lower)
            raise _refused(name, value, f"a lower threshold of at most the upper one, {upper}")
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise _refused("loss_type", self.loss_type, "ppo_clip, or bypass_mode: true beside it")
        if not self.bypass_mode:
            return
        if self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise _refused("rollout_is", self.rollout_is, "null with bypass_mode and loss_type ppo_clip: the ratio "
                           "current / engine already corrects, weights on top would count the gap twice; loss_type: "
                           "reinforce uses weights")  # fmt: skip
        if self.rollout_is_batch_normalize:
            raise _refused("rollout_is_batch_normalize", True, "false with bypass_mode: weights follow the policy from "
                           "micro-batch to micro-batch, so that a mean would depend on the cut")  # fmt: skip

    def _check_storage(self) -> None:
        error = storage_error(self.storage, self.largest_cap)
        if self.rollout_is_dtype != "float32" and error > MAX_STORAGE_ERROR:
            raise _refused("rollout_is_dtype", self.rollout_is_dtype, f"float32: rounding may change a weight of up to "
                           f"{self.largest_cap:g} by {error:.1e}, more than {MAX_STORAGE_ERROR:g} (float16 is safe up "
                           "to a threshold of 4)")  # fmt: skip
        if self.adaptive.target_ess is not None:
            lowest, highest = self.adaptive.threshold_bounds
            if self.rollout_is is None:
                raise _refused("adaptive.target_ess", self.adaptive.target_ess, "null without rollout_is: there are no "
                               "weights to steer")  # fmt: skip
            if not lowest <= self.rollout_is_threshold <= highest:
                raise _refused("rollout_is_threshold", self.rollout_is_threshold, f"inside adaptive.threshold_bounds = "
                               f"[{lowest:g}, {highest:g}], where it starts")  # fmt: skip
        if self.adaptive.target_rejection is not None:
            if not self.rollout_rs:
                raise _refused("adaptive.target_rejection", self.adaptive.target_rejection, "null without rollout_rs: "
                               "there is nothing to steer")  # fmt: skip
            if not self.adaptive.scale_bounds[0] <= 1 <= self.adaptive.scale_bounds[1]:
                raise _refused("adaptive.scale_bounds", self.adaptive.scale_bounds, "a range around 1, where it starts")


def correction_settings(
    block: Mapping[str, Any] | RolloutCorrectionSettings | None,
) -> RolloutCorrectionSettings | None:
    """Settings from the config block ``module.rollout_correction``; ``None`` where it is null.

    Raises:
        SettingError: an unknown key or a value that is not allowed.
    """
    return None if block is None else build(RolloutCorrectionSettings, BLOCK, block)


def _refused(name: str, value: Any, allowed: str) -> SettingError:
    return SettingError(f"{BLOCK}.{name}", value, allowed)
