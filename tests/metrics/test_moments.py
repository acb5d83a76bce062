"""Streaming moments equal those of all data at once, in any batching, and survive a checkpoint."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.metrics.moments import RunningMoments


def seen(*batches: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    return moments


def numbers(moments: RunningMoments) -> tuple[float, float, float]:
    return moments.count.item(), moments.mean.item(), moments.var.item()


def test_batches_of_unequal_size() -> None:
    """The variance is divided by n - 1. Averaged means give 8.5, a count of batches 25.0016."""
    assert numbers(seen([1, 2, 3], [10, 20])) == pytest.approx((5, 7.2, 63.7), rel=1e-12)


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=6), st.sampled_from([0.0, 1e6])
)
@settings(max_examples=50, deadline=None)
def test_any_batching_gives_the_moments_of_all_data(batches: list[list[float]], offset: float) -> None:
    moments, every = RunningMoments(), []
    for batch in batches:
        x = torch.tensor(batch, dtype=torch.float64) + offset
        moments.update(x)
        every.append(x)
    x = torch.cat(every)
    expected = (len(x), x.mean().item() if len(x) else 0.0, x.var().item() if len(x) > 1 else 0.0)
    assert numbers(moments) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_masked_and_non_finite_elements_are_left_out() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, math.nan, 3.0, 50.0, math.inf]), torch.tensor([True, False, True, False, False]))
    moments.update(torch.tensor([2.0, math.nan, math.inf]))
    assert numbers(moments) == pytest.approx((3, 2.0, 1.0))
    normalised = moments.normalise(torch.tensor([2.0, math.nan, math.inf]))
    assert normalised[0] == 0.0
    assert not normalised[1:].isfinite().any(), "a broken score must stay visible"


def test_normalised_scores_have_the_running_scale() -> None:
    moments = seen([1, 2, 3], [10, 20])
    normalised = moments.normalise(torch.tensor([7.2, 7.2 + math.sqrt(63.7)]))
    assert normalised.dtype == torch.float32
    torch.testing.assert_close(normalised, torch.tensor([0.0, 1.0]))
    assert moments.std.item() == pytest.approx(math.sqrt(63.7))


@pytest.mark.parametrize("batches", [[], [[]], [[3.7]], [[0.35] * 7, [0.35]]])
def test_without_a_spread_everything_is_zero(batches: list[list[float]]) -> None:
    moments = seen(*batches)
    assert moments.normalise(torch.tensor([0.35, 3.7, -1.0])).tolist() == [0.0, 0.0, 0.0]
    assert all(math.isfinite(number) for number in numbers(moments))


def test_an_empty_batch_changes_nothing() -> None:
    moments = seen([1, 2, 3])
    before = numbers(moments)
    moments.update(torch.zeros(0))
    moments.update(torch.tensor([math.nan, 9.0]), torch.zeros(2))
    assert numbers(moments) == before


def test_state_survives_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole, first = seen([0.1, 0.2, 0.4], [0.1, 0.2]), seen([0.1, 0.2, 0.4])
    path = tmp_path / "module.pt"
    torch.save(torch.nn.ModuleDict({"moments": first}).state_dict(), path)
    again = RunningMoments()
    torch.nn.ModuleDict({"moments": again}).load_state_dict(torch.load(path, weights_only=True))
    again.update(torch.tensor([0.1, 0.2]))
    assert numbers(again) == numbers(whole)


def test_a_checkpoint_without_the_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="moments"):
        torch.nn.ModuleDict({"moments": RunningMoments()}).load_state_dict({})


def test_a_saved_state_does_not_move_on_with_the_module() -> None:
    moments = seen([1, 2, 3])
    state = copy.copy(moments.state_dict())
    moments.update(torch.tensor([100.0]))
    other = RunningMoments()
    other.load_state_dict(state)
    assert numbers(other) == numbers(seen([1, 2, 3]))


def test_low_precision_of_the_module_does_not_touch_the_state() -> None:
    """Lightning's ``bf16-true`` casts the whole module."""
    moments = seen([1000.1, 1000.2, 1000.4])
    before = numbers(moments)
    torch.nn.ModuleDict({"moments": moments}).to(torch.bfloat16)
    assert numbers(moments) == before
