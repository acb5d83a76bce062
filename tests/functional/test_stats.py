"""Masked statistics: reference numbers, numerical safety, and that they are global."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.stats import (
    SUM_ROUNDING,
    all_reduce_max,
    all_reduce_sum,
    deviation_of_sums,
    explained_variance,
    masked_mean,
    masked_moments,
    masked_sum,
    standardise,
    whiten,
)
from lightning_rlhf.metrics.moments import RunningMoments
from tests.ranks import run_ranks

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo_losses.json").read_text())["cases"]
JUNK = [math.nan, math.inf, -math.inf, 1e30]


# --- reference numbers and reported faults -----------------------------------------------------------------------


@pytest.mark.parametrize("junk", [None, *JUNK])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in GOLDEN if c["family"] == "whiten"])
def test_whitening_matches_the_references(case: dict[str, Any], dtype: torch.dtype, junk: float | None) -> None:
    values = torch.tensor(case["inputs"]["values"], dtype=dtype)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    values = values if junk is None else torch.where(mask, values, junk)
    whitened = whiten(values, mask, **case["config"])
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    expected = torch.tensor(case["outputs"]["whitened"], dtype=dtype)[mask]
    torch.testing.assert_close(whitened[mask], expected, rtol=tolerance, atol=tolerance / 10)
    assert (whitened[~mask] == 0).all()


def test_averages_leave_placeholders_out() -> None:
    """An entropy estimate of 1.5 (0.25 with the placeholder +1 in it)."""
    logprobs, mask = torch.tensor([[-1.0, -2.0, 1.0, 1.0]]), torch.tensor([[1, 1, 0, 0]])
    assert masked_mean(-logprobs, mask).item() == 1.5
    assert masked_sum(-logprobs, mask).item() == 3.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whitening_without_a_spread_is_zero(dtype: torch.dtype) -> None:
    """One element, equal ones, and none: 0 and not NaN."""
    assert whiten(torch.tensor([3.7], dtype=dtype), torch.tensor([1])).item() == 0.0
    assert whiten(torch.full((7,), 0.35, dtype=dtype), torch.ones(7)).abs().max() == 0.0
    assert whiten(torch.tensor([1.0, math.nan], dtype=dtype), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_whitening_is_unbiased() -> None:
    """The variance is divided by n - 1."""
    expected = torch.tensor([-0.707107, 0.707107])
    torch.testing.assert_close(whiten(torch.tensor([1.0, 3.0]), torch.ones(2)), expected, rtol=1e-6, atol=1e-6)


def test_epsilon_is_added_to_the_variance() -> None:
    x = torch.tensor([0.0, 2e-8**0.5], dtype=torch.float64)  # variance 1e-8
    expected = torch.tensor([-0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(whiten(x, torch.ones(2)), expected)


def test_whitening_may_keep_the_mean() -> None:
    x = torch.tensor([1.0, 3.0, math.nan])
    kept = whiten(x, torch.tensor([1, 1, 0]), shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([2 - 0.5**0.5, 2 + 0.5**0.5, 0.0]))


# --- numerical safety --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0.35, 1e4, 1e8, 1e30])
def test_rounding_is_no_spread(base: float) -> None:
    x = torch.full((64,), base)
    x[::2] = torch.nextafter(x[::2], torch.tensor(math.inf))
    assert (whiten(x, torch.ones(64)) == 0).all()


def test_a_small_spread_on_a_large_mean_is_kept() -> None:
    x = 1e6 + torch.arange(8, dtype=torch.float64) * 1e-3
    moments = masked_moments(x, torch.ones(8))
    assert moments.var.item() == pytest.approx(6e-6, rel=1e-6), "E[x^2] - E[x]^2 has no digit of this left"
    assert whiten(x, torch.ones(8)).std().item() == pytest.approx(1.0, rel=1e-2)


@given(st.integers(0, 2**31 - 1), st.floats(-100, 100), st.floats(0.1, 10), st.sampled_from(JUNK))
@settings(max_examples=40, deadline=None)
def test_whitened_values_have_mean_zero_and_variance_one(seed: int, shift: float, scale: float, junk: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = shift + scale * torch.randn(4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.6
    mask[0, :2] = True
    whitened = whiten(torch.where(mask, x, junk), mask)
    assert whitened[mask].mean().abs() < 1e-4
    assert abs(whitened[mask].var().item() - 1) < 1e-4
    assert (whitened[~mask] == 0).all()
    torch.testing.assert_close(whitened, whiten(x, mask))
    order = torch.randperm(4, generator=generator)
    torch.testing.assert_close(whiten(x[order], mask[order]), whitened[order])


def test_moments_of_nothing_and_of_one() -> None:
    for x, mask, expected in (
        (torch.zeros(2, 0), torch.zeros(2, 0), (0, 0, 0)),
        (torch.full((3,), math.nan), torch.zeros(3), (0, 0, 0)),
        (torch.tensor([math.inf, 2.5]), torch.tensor([0, 1]), (2.5, 0, 1)),
    ):
        moments = masked_moments(x, mask)
        assert (moments.mean.item(), moments.var.item(), moments.count.item()) == expected
        assert masked_mean(x, mask).item() == expected[0]
        assert torch.equal(whiten(x, mask), torch.zeros(x.shape))


def test_nan_on_a_valid_element_is_not_hidden() -> None:
    x, mask = torch.tensor([1.0, math.nan, 2.0]), torch.ones(3)
    assert masked_mean(x, mask).isnan()
    assert masked_moments(x, mask).var.isnan()
    assert whiten(x, mask).isnan().all()
    assert explained_variance(x, torch.arange(3.0), mask).isnan()
    assert explained_variance(torch.arange(3.0), x, mask).isnan()


def test_shapes_that_would_broadcast_are_refused() -> None:
    for function in (masked_mean, masked_moments, whiten):
        with pytest.raises(ValueError, match=r"x \[2, 3\], mask \[2, 1\]"):
            function(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"values \[2\], returns \[3\]"):
        explained_variance(torch.ones(2), torch.ones(3), torch.ones(3))


# --- explained variance ------------------------------------------------------------------------------------------


def test_explained_variance() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, math.nan]]), torch.tensor([[1, 1, 1, 0]])
    for values, expected in (
        (returns, 1.0),
        (torch.full_like(returns, 2.0), 0.0),
        (returns + 5.0, 1.0),
        (torch.tensor([[3.0, 2.0, 1.0, math.inf]]), -3.0),
        (torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 1 - (1 / 3) / 1.0),
    ):
        assert explained_variance(values, returns, mask).item() == pytest.approx(expected)


def test_equal_returns_leave_nothing_to_explain() -> None:
    values, returns = torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), 0.35)
    assert explained_variance(values, returns, torch.ones(3)).item() == 0.0
    assert explained_variance(values, returns, torch.zeros(3)).item() == 0.0


# --- more than one rank ------------------------------------------------------------------------------------------


def two_ranks() -> tuple[list[Tensor], list[Tensor]]:
    """Unequal parts of one batch, and the masks of three rounds: both ranks, one rank, none has a valid element."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3)) * 3 + 10
    mask = torch.rand(5, 4, generator=torch.Generator().manual_seed(4)) < 0.6
    only_first = mask.clone()
    only_first[3:] = False
    return list(x.split([3, 2])), [mask, only_first, torch.zeros_like(mask)]


def statistics(x: Tensor, mask: Tensor) -> dict[str, Any]:
    x = torch.where(mask, x, math.nan)
    moments, running = masked_moments(x, mask), RunningMoments()
    running.update(x[:1], mask[:1])
    running.update(x[1:], mask[1:])
    return {
        "mean": masked_mean(x, mask).item(),
        "local": masked_moments(x, mask, reduce=False).count.item(),
        "moments": [moments.mean.item(), moments.var.item(), moments.count.item()],
        "running": [running.mean.item(), running.var.item(), running.count.item()],
        "whitened": whiten(x, mask).tolist(),
        "explained": explained_variance(x.round(), x, mask).item(),
    }


def of_one_rank(rank: int) -> dict[str, Any]:
    own = torch.full((2,), float(rank + 1))
    result: dict[str, Any] = {"sum": all_reduce_sum(own).tolist(), "max": all_reduce_max(own).tolist()}
    result["untouched"] = own.tolist()
    parts, masks = two_ranks()
    result["rounds"] = [statistics(parts[rank], mask.split([3, 2])[rank]) for mask in masks]
    return result


def test_two_ranks_agree_with_one_process(tmp_path: Path) -> None:
    results = run_ranks(of_one_rank, folder=tmp_path)
    parts, masks = two_ranks()
    for rank, result in enumerate(results):
        assert (result["sum"], result["max"]) == ([3.0, 3.0], [2.0, 2.0])
        assert result["untouched"] == [rank + 1.0] * 2, "a reduction returns a new tensor"
    for index, mask in enumerate(masks):
        expected = statistics(torch.cat(parts), mask)
        rounds = [result["rounds"][index] for result in results]
        for key in ("mean", "moments", "running", "explained"):
            for own in rounds:
                assert own[key] == pytest.approx(expected[key], rel=1e-12), (index, key)
        assert [own["local"] for own in rounds] == [part.sum().item() for part in mask.split([3, 2])]
        torch.testing.assert_close(
            torch.tensor(rounds[0]["whitened"] + rounds[1]["whitened"]), torch.tensor(expected["whitened"])
        )


def test_without_ranks_a_reduction_is_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert all_reduce_sum(x) is x
    assert all_reduce_max(x) is x


@pytest.mark.parametrize(("unbiased", "expected"), [(True, 5 / 3), (False, 1.25)])
def test_deviation_of_sums(unbiased: bool, expected: float) -> None:
    """1, 2, 3, 4: sum 10, squares 30, squared deviations 5."""
    assert deviation_of_sums(10.0, 30.0, 4.0, unbiased=unbiased) == pytest.approx(math.sqrt(expected), rel=1e-12)
    assert deviation_of_sums(2.0, 5.0, 1.0) == pytest.approx(1.0), "one element divides by 1"
    assert deviation_of_sums(10.0, 30.0, 4.0) == deviation_of_sums(10.0, 30.0, 4.0, unbiased=True)


def test_float64_rounding_is_no_deviation() -> None:
    """A share of 8 units in the last place of the squares is rounding, a bit more is a spread."""
    eps = torch.finfo(torch.float64).eps
    assert 8 * eps == SUM_ROUNDING
    total, count = 4.0, 4.0  # of ones: squares 4, and a few units more
    assert deviation_of_sums(total, 4.0 * (1 + 8 * eps), count) == 0.0
    assert deviation_of_sums(total, 4.0 * (1 + 10 * eps), count) == pytest.approx(math.sqrt(40 * eps / 3), rel=1e-6)
    assert math.isnan(deviation_of_sums(math.nan, 4.0, 4.0))
    assert deviation_of_sums(0.0, math.inf, 4.0) == math.inf


def test_standardise_adds_its_epsilon_to_the_variance() -> None:
    """Variance 1e-8 beside the default of 1e-8: half a deviation becomes 0.5 / sqrt(2)."""
    x = torch.tensor([-1e-4, 1e-4], dtype=torch.float64) / math.sqrt(2)
    found = standardise(x, masked_moments(x, torch.ones(2)))
    assert found.tolist() == pytest.approx([-0.5, 0.5], rel=1e-9)
