"""Robust z-scores: how far a value lies from the others, where the outliers themselves must not set the scale."""

from __future__ import annotations

import torch
from torch import Tensor

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
TAIL = 0.02
"""Share of the values, on each side, that may be outliers without a say in the scale."""
TAIL_DEVIATIONS = 1.5
"""Deviations between the median and the quantile 1 - :data:`TAIL`.

Of a normal distribution it would be 2.05. With 1.5 a z of 3 lies at twice the quantile's distance, which eight values
in ten thousand of an exponential distribution exceed, and six in a thousand of Student's t with 3 degrees of freedom.
"""


def robust_z(values: Tensor, *, floor: float) -> Tensor:
    """Distance of each value from the median, in robust standard deviations of its side.

    The scale of a side is the largest of three: the median absolute deviation over all values (times 1.4826, so that it
    is the standard deviation of normal values); the distance between the median and the quantile that leaves 2 % of the
    values outside (over 1.5, see :data:`TAIL_DEVIATIONS`); and ``floor``. The first is the usual one (Iglewicz and
    Hoaglin 1993): up to half of the values cannot move it, so one outlier does not hide the next. It is blind to heavy
    and uneven tails, and 0 where more than half of the values are equal, as among prompts that are always solved. The
    second widens the scale where more than 2 % of the values lie far out: these are a tail, no outliers. Of normal
    values it is 1.37 standard deviations, so it usually decides.

    Args:
        values: ``[N]`` float; NaN marks a value that was not measured.
        floor: smallest scale, > 0, in the unit of the values.

    Returns:
        ``[N]`` float64, negative below the median; NaN where the value is.

    Raises:
        ValueError: ``floor`` is not a number > 0.
    """
    if not floor > 0:
        raise ValueError(f"robust_z: floor = {floor} is not allowed: a number > 0")
    values = values.double()
    measured = values[~values.isnan()].sort().values
    if not len(measured):
        return values
    middle = _middle(measured)
    deviation = NORMAL_MAD * median((measured - middle).abs())
    outside = min(len(measured) - 1, max(1, int(TAIL * len(measured))))  # values beyond each quantile, at least one
    low, high = middle - float(measured[outside]), float(measured[-1 - outside]) - middle
    low, high = (max(deviation, tail / TAIL_DEVIATIONS, floor) for tail in (low, high))
    distance = values - middle
    return distance / torch.where(distance < 0, low, high)


def median(values: Tensor) -> float:
    """The median; the mean of the two middle values of an even number (``torch.median`` takes the lower one)."""
    return _middle(values.double().sort().values)


def _middle(ordered: Tensor) -> float:
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
