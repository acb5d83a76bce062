"""Robust z-scores against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.functional.outliers import TAIL_DEVIATIONS, median, robust_z


def z(values: list[float], floor: float = 1e-9) -> list[float]:
    return robust_z(torch.tensor(values, dtype=torch.float64), floor=floor).tolist()


def test_the_scale_is_the_median_absolute_deviation() -> None:
    """Median 4; distances 3 2 1 0 1 2 96, their median 2. The second largest value lies 2 above: 2 / 1.5 is less."""
    found = z([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    scale = 1.4826 * 2
    assert found == pytest.approx([-3 / scale, -2 / scale, -1 / scale, 0.0, 1 / scale, 2 / scale, 96 / scale])


def test_one_outlier_does_not_hide_the_next() -> None:
    """Mean and standard deviation would give the second one z = 0.3."""
    values = torch.cat(
        [torch.linspace(-1, 1, 198, dtype=torch.float64), torch.tensor([50.0, 1e6], dtype=torch.float64)]
    )
    found = robust_z(values, floor=1e-9)
    plain = (values - values.mean()) / values.std()
    assert (found[-2:] > 3).all() and plain[-2] < 1 and (found[:-2].abs() < 3).all()


def test_a_tail_widens_the_scale_of_its_side_only() -> None:
    """100 values: 94 zeros, four of 3 and one of 30 above, one of -1 below; two of 100 may lie outside."""
    found = z([0.0] * 94 + [3.0] * 4 + [30.0, -1.0], floor=0.1)
    assert found[94] == pytest.approx(TAIL_DEVIATIONS), "the quantile itself"
    assert found[98] == pytest.approx(30 / (3 / TAIL_DEVIATIONS))
    assert found[99] == pytest.approx(-1 / 0.1), "below there is no tail: the floor"


def test_equal_values_are_no_outliers_and_the_floor_is_the_scale() -> None:
    assert z([2.0] * 5) == [0.0] * 5
    assert z([2.0] * 9 + [2.5], floor=0.25)[-1] == pytest.approx(2.0)


def test_what_was_not_measured_stays_so_and_takes_no_part() -> None:
    found = z([1.0, math.nan, 2.0, 3.0])
    assert math.isnan(found[1]) and [found[0], found[2], found[3]] == z([1.0, 2.0, 3.0])
    assert all(math.isnan(value) for value in z([math.nan, math.nan]))
    assert z([]) == []


@pytest.mark.parametrize("floor", [0.0, -1.0, math.nan])
def test_a_floor_that_is_no_scale_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match=r"floor = .* is not allowed: a number > 0"):
        z([1.0], floor=floor)


def test_the_median_of_an_even_number_is_the_mean_of_two() -> None:
    assert median(torch.tensor([1.0, 2.0, 10.0, 4.0])) == 3.0
    assert median(torch.tensor([7.0])) == 7.0
