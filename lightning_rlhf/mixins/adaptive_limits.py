"""Limits of rollout correction that follow the data, within bounds."""

from __future__ import annotations

import math
from typing import Any

from lightning_rlhf.control import Control
from lightning_rlhf.mixins.correction_settings import RolloutCorrectionSettings

CAP = "importance_threshold"
SCALE = "rejection_scale"
OWNER = "RolloutCorrection"
SMALLEST_LIMIT = 1e-3
"""Lower bound of a knob without a controller; a callback may scale the knob down to it."""


class AdaptiveLimits:
    """The knobs ``importance_threshold`` (cap of the weights) and ``rejection_scale`` (width of the rejection bands).

    Both are integral controllers on the logarithm of the limit: once per iteration the logarithm moves by at most
    ``step``, in proportion to the distance of a moving average of the measured quantity from its target, relative to
    the largest possible distance. The limit itself is the integral, so a bound stops it without wind-up. A reading that
    is absent (nothing was measured) or not finite changes nothing.

    ==================  ======================================  ==================================================
    knob                measured                                moves
    ==================  ======================================  ==================================================
    importance_threshold  effective sample size of used weights  down while it is below the target: fewer large weights
    rejection_scale     share of valid tokens rejected           up while it is above the target: wider bands
    ==================  ======================================  ==================================================

    Args:
        control: of the module; knobs are registered there, owned where a target is set, and saved by it.
        settings: of rollout correction.
    """

    def __init__(self, control: Control, settings: RolloutCorrectionSettings) -> None:
        self._control, self._settings = control, settings
        self._averages: dict[str, float] = {}
        adaptive = settings.adaptive
        if settings.rollout_is is not None:
            low, high = SMALLEST_LIMIT, math.inf
            if settings.rollout_is_dtype != "float32":
                high = settings.largest_cap  # the rounding error is bounded up to this cap
            if adaptive.target_ess is not None:
                low, high = adaptive.threshold_bounds
            control.register(CAP, float(settings.rollout_is_threshold), minimum=low, maximum=high)
            if adaptive.target_ess is not None:
                control.own(CAP, OWNER)
        if settings.rollout_rs:
            low, high = (SMALLEST_LIMIT, math.inf) if adaptive.target_rejection is None else adaptive.scale_bounds
            control.register(SCALE, 1.0, minimum=low, maximum=high)
            if adaptive.target_rejection is not None:
                control.own(SCALE, OWNER)

    @property
    def cap(self) -> float:
        """The current cap."""
        known = CAP in self._control.knobs
        return self._control.value(CAP) if known else float(self._settings.rollout_is_threshold)

    @property
    def scale(self) -> float:
        """The current width of the rejection bands, as a multiple of the configured one."""
        return self._control.value(SCALE) if SCALE in self._control.knobs else 1.0

    def observe(self, ess: float | None, rejected: float | None) -> None:
        """Take in the readings of one iteration, reduced over ranks; the limits change from the next one on."""
        adaptive = self._settings.adaptive
        self._steer(CAP, ess, adaptive.target_ess)
        self._steer(SCALE, rejected, adaptive.target_rejection)

    def _steer(self, knob: str, reading: float | None, target: float | None) -> None:
        if target is None or reading is None or not math.isfinite(reading):
            return
        past = self._averages.get(knob, reading)
        share = self._settings.adaptive.smoothing
        average = self._averages[knob] = share * past + (1 - share) * reading
        error = (average - target) / (1 - target if average > target else target)
        value = self._control.knobs[knob].value * math.exp(self._settings.adaptive.step * max(-1.0, min(1.0, error)))
        self._control.set(knob, value, OWNER)

    def state_dict(self) -> dict[str, Any]:
        """The averages; the limits themselves are in the state of ``control``."""
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = dict(state["averages"])
