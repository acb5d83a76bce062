"""Moments per group against exact numbers: ragged and absent groups, parts that are merged, masked NaN, two ranks."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_rlhf.functional.groups import group_moments, group_sum, merged, row_sums, standardise_groups
from lightning_rlhf.functional.stats import Moments, masked_moments
from tests.ranks import run_ranks

F64 = torch.float64
ROWS = torch.tensor([[1.0, 2.0, 4.0], [10.0, math.nan, math.nan], [30.0, 50.0, math.inf], [7.0, 7.0, 7.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
MEMBERS = torch.tensor([0, 2, 2, 3])
"""Group 1 has no row, group 3 equal elements."""
ELEMENTS = {0: [1.0, 2.0, 4.0], 1: [], 2: [10.0, 30.0, 50.0], 3: [7.0, 7.0, 7.0]}


def exact(elements: list[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(elements) if elements else 0.0
    return mean, statistics.variance(elements) if len(elements) > 1 else 0.0, len(elements)


def numbers(moments: Moments) -> list[tuple[float, float, float]]:
    return list(zip(moments.mean.tolist(), moments.var.tolist(), moments.count.tolist(), strict=True))


def test_moments_of_ragged_groups_are_exact_and_an_absent_group_has_none() -> None:
    found = group_moments(ROWS, MASK, MEMBERS, 4)
    assert numbers(found) == [pytest.approx(exact(ELEMENTS[group]), abs=1e-12) for group in range(4)]


def test_moments_of_whole_rows() -> None:
    x, mask = torch.tensor([1.0, 5.0, math.nan, 3.0]), torch.tensor([True, True, False, True])
    found = group_moments(x, mask, torch.tensor([1, 0, 0, 1]), 2)
    assert numbers(found) == [exact([5.0]), exact([1.0, 3.0])]


def test_digits_survive_a_large_mean() -> None:
    x = torch.tensor([1e8, 1e8 + 1, 1e8 + 2, 0.0], dtype=F64)
    found = group_moments(x, torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 0, 1]), 2)
    assert numbers(found)[0] == (1e8 + 1, 1.0, 3.0)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_two_parts_merged_are_the_whole(cut: int) -> None:
    parts = [group_moments(ROWS[s], MASK[s], MEMBERS[s], 4) for s in (slice(None, cut), slice(cut, None))]
    whole, both = group_moments(ROWS, MASK, MEMBERS, 4), merged(*parts)
    for name in ("mean", "var", "count"):
        torch.testing.assert_close(getattr(both, name), getattr(whole, name), rtol=1e-14, atol=1e-12)


def test_a_nan_on_a_valid_element_stays_in_its_group() -> None:
    found = group_moments(ROWS.where(ROWS != 2.0, math.nan), MASK, MEMBERS, 4)
    assert found.mean.isnan().tolist() == [True, False, False, False]


def test_each_group_has_mean_0_and_variance_1_and_a_small_one_the_numbers_of_all() -> None:
    valid = ROWS.nan_to_num(0.0, posinf=0.0)
    own, whole = group_moments(ROWS, MASK, MEMBERS, 4), masked_moments(ROWS, MASK)
    few = torch.tensor([False, False, True, False])
    found = standardise_groups(valid, MEMBERS, own, whole, few, eps=0.0)
    mean, var, _ = exact(ELEMENTS[0])
    assert found[0].tolist() == pytest.approx([(x - mean) / math.sqrt(var) for x in ELEMENTS[0]], abs=1e-14)
    assert found[0].mean() == pytest.approx(0.0, abs=1e-15) and found[0].var() == pytest.approx(1.0)
    mean, var, _ = exact([x for elements in ELEMENTS.values() for x in elements])
    assert found[1, 0].item() == pytest.approx((10.0 - mean) / math.sqrt(var), abs=1e-14)
    assert found[3].tolist() == [0.0, 0.0, 0.0], "equal elements have nothing to learn from"


def on_rank(rank: int) -> list[Tensor]:
    """Rank 0 has rows of groups 0 and 2, rank 1 of 2 and 3; nobody has one of group 1."""
    part = slice(None, 2) if rank == 0 else slice(2, None)
    found = group_moments(ROWS[part], MASK[part], MEMBERS[part], 4)
    return [found.mean, found.var, found.count]


def test_groups_that_a_rank_lacks_take_part(tmp_path: Path) -> None:
    whole = group_moments(ROWS, MASK, MEMBERS, 4)
    for found in run_ranks(on_rank, folder=tmp_path):
        for own, expected in zip(found, (whole.mean, whole.var, whole.count), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-12)


def test_sums_are_in_float64() -> None:
    x = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    assert group_sum(x, torch.zeros(3, dtype=torch.int64), 1).tolist() == [1.0]
    rows = torch.tensor([[1e8, 1.0, -1e8]], dtype=torch.float32)
    assert row_sums(rows, torch.ones_like(rows, dtype=torch.bool)).tolist() == [1.0]
