"""Metrics reduced at once: means over valid elements only, maxima that stay maxima."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.metrics.batch import MetricBatch


def test_means_are_over_the_valid_elements_of_all_calls() -> None:
    batch = MetricBatch()
    batch.mean("x", torch.tensor([4.0, 100.0]), torch.tensor([True, False]))
    batch.mean("x", torch.tensor([0.0, 0.0, 0.0]), torch.ones(3, dtype=torch.bool))
    assert batch.compute() == {"x": 1.0}, "one element of 4 and three of 0, however they are cut"


def test_padding_may_hold_anything() -> None:
    batch, mask = MetricBatch(), torch.tensor([True, True, False, False])
    values = torch.tensor([1.0, 3.0, math.nan, math.inf])
    batch.mean("mean", values, mask, std="std")
    batch.max("max", values, mask)
    batch.min("min", values, mask)
    assert batch.compute() == pytest.approx({"mean": 2.0, "std": math.sqrt(2), "max": 3.0, "min": 1.0})


def test_nan_on_a_valid_element_is_reported() -> None:
    batch = MetricBatch()
    batch.mean("mean", torch.tensor([1.0, math.nan]), std="std")
    batch.max("max", torch.tensor([1.0, math.nan]))
    assert all(math.isnan(value) for value in batch.compute().values())


@pytest.mark.parametrize("value", [0.35, 12345.67, 1e30])
def test_equal_elements_have_no_deviation(value: float) -> None:
    """The rounding of squares made 1.8e-4 of scores of 12345.67, one float32 step is no spread either."""
    for scores in (torch.full((8,), value), torch.full((1,), value)):
        batch = MetricBatch()
        batch.mean("mean", scores, std="std")
        assert batch.compute()["std"] == 0.0


def test_a_small_deviation_on_a_large_mean_is_that_of_float64() -> None:
    scores = 12345.67 + 0.05 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    batch = MetricBatch()
    for part in scores.split(7):
        batch.mean("mean", part, std="std")
    assert batch.compute()["std"] == pytest.approx(scores.double().std().item(), rel=1e-4)


def test_nothing_measured_is_absent_and_a_sum_of_nothing_is_zero() -> None:
    batch = MetricBatch()
    batch.mean("mean", torch.ones(2), torch.zeros(2, dtype=torch.bool), std="std")
    batch.max("max", torch.ones(2), torch.zeros(2, dtype=torch.bool))
    batch.min("min", torch.ones(0))
    batch.sum("sum", torch.ones(0))
    assert batch.compute() == {"sum": 0.0}
    assert MetricBatch().compute() == {}


def test_extremes_are_kept_over_calls() -> None:
    batch = MetricBatch()
    for value in (2.0, -5.0, 3.0):
        batch.max("max", torch.tensor(value))
        batch.min("min", torch.tensor(value))
        batch.sum("sum", torch.tensor([value, 1.0]))
    assert batch.compute() == {"max": 3.0, "min": -5.0, "sum": 3.0}


def test_long_sums_do_not_lose_float32_digits() -> None:
    batch = MetricBatch()
    batch.mean("mean", torch.full((2**25,), 0.1), std="std")
    result = batch.compute()
    assert result["mean"] == pytest.approx(0.1, rel=1e-7) and result["std"] < 1e-6
