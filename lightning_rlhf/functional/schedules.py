"""Learning-rate schedules as functions of the run's progress."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    progress: float,
    *,
    step: float,
    total: float,
    warmup: float = 0.0,
    schedule: Schedule = "constant",
    final: float = 0.0,
) -> float:
    """Factor on the base learning rate for the next optimiser step.

    Linear warm-up, then constant, or linear or cosine decay to ``final``. The unit is iterations throughout;
    optimiser steps are fractions of one, so early epoch breaks never stretch the schedule.

    Args:
        progress: iterations done so far, e.g. 2.5 in the middle of the third one.
        step: what one optimiser step adds to ``progress``.
        total: iterations of the run, where the decay ends.
        warmup: iterations of warm-up; the first step of the run already has a rate above 0.
        schedule: what follows the warm-up.
        final: share of the base rate that is left at the end.
    """
    if progress + step < warmup:
        return (progress + step) / warmup
    if schedule == "constant":
        return 1.0
    done = min(1.0, max(0.0, (progress - warmup) / max(total - warmup, step)))
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return final + (1.0 - final) * share
