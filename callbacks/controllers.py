"""What callbacks that steer a coefficient share: the PID controller, and the start of a knob within bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.control import Control

RISING = 0.03
"""Growth of the average reading per step of the controller, as a share, from which on it counts as still rising."""
LARGEST_ERROR = math.log(20.0)
"""The controller's error is clamped to +- this, so that one outlier cannot move the coefficient across its range."""


@dataclass
class LogPID:
    """PID controller, in logarithms, of a coefficient that lowers what is measured.

    ``log c = log c_0 + kp e + ki sum(e) + kd (e - e')`` with ``e = log(average / target)``. In logarithms a reading ten
    times too high and one ten times too low are errors of the same size. The sum of errors stops where it brings the
    coefficient to its bound, and while the reading is still rising to the target, as that of every new policy does
    (anti-windup by conditional integration).

    Attributes:
        target: of the reading, > 0.
        kp, ki, kd: gains.
        minimum, maximum: bounds of the coefficient; the caller applies the lower one.
    """

    target: float
    kp: float
    ki: float
    kd: float
    minimum: float
    maximum: float
    origin: float | None = None
    """log c_0."""
    integral: float = 0.0
    error: float | None = None

    def next(self, coefficient: float, average: float, past: float | None) -> float:
        """The coefficient after a reading, at most ``maximum``; updates the controller's state.

        Args:
            coefficient: in force.
            average: moving average of the reading, finite.
            past: that average before the last reading; ``None`` if there was none.
        """
        if self.origin is None:
            self.origin = math.log(coefficient)
        # An estimate may be 0 or negative and has no logarithm then; the error is at its lower bound.
        ratio = max(average / self.target, math.exp(-LARGEST_ERROR))
        error = min(math.log(ratio), LARGEST_ERROR)
        slope = 0.0 if self.error is None else error - self.error
        self.error = error
        base = self.origin + self.kp * error + self.kd * slope
        # A new policy has a reading of 0 whatever the coefficient: while it rises, there is no effect to see.
        rising = past is None or average - past > RISING * abs(past)
        if error >= 0 or not rising:
            self.integral = self._integrate(base, error)
        return math.exp(min(base + self.ki * self.integral, math.log(self.maximum)))

    def _integrate(self, base: float, error: float) -> float:
        """The sum of errors with this one added, but at most what brings the output ``base + ki sum`` to its bound."""
        full = self.integral + error
        bound = math.log(self.maximum if error > 0 else self.minimum)
        pushes_out = (base + self.ki * full - bound) * error > 0
        if not pushes_out or self.ki == 0:
            return full
        least, most = sorted((self.integral, full))
        return min(max((bound - base) / self.ki, least), most)

    def state_dict(self) -> dict[str, Any]:
        return {"origin": self.origin, "integral": self.integral, "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.origin, self.integral, self.error = state["origin"], state["integral"], state["error"]


def may_act(since_change: int, smoothing: float) -> bool:
    """Whether a moving average begun at the last change has seen a full window of ``1 / (1 - smoothing)`` readings."""
    return since_change * (1.0 - smoothing) > 1.0 - 1e-9  # 5 * (1 - 0.8) is a little under 1


def own_within(
    control: Control, knob: str, owner: str, minimum: float, maximum: float, *, key: str, block: str, warn: bool
) -> None:
    """Claim a knob for a controller; a start value outside the controller's bounds moves to the nearer one.

    Args:
        key: configuration key of the start value.
        block: name of the callback, for the warning.
        warn: move and say so; otherwise only claim (Lightning sets callbacks up more than once).
    """
    control.own(knob, owner)
    value = control.knobs[knob].value
    inside = min(max(value, minimum), maximum)
    if warn and value != inside:
        rank_zero_warn(
            f"{key} = {value} lies outside callbacks.{block}.minimum = {minimum} and callbacks.{block}.maximum = "
            f"{maximum}: the controller starts at {inside}"
        )
        control.set(knob, inside, owner)
