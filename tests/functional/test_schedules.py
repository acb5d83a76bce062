"""Learning-rate schedules: exact values at exact points of the run."""

from __future__ import annotations

import math

import pytest

from lightning_rlhf.functional.schedules import Schedule, learning_rate_factor


def test_linear_decay_is_half_at_half_and_zero_at_the_end() -> None:
    """10 iterations x 3 epochs x 4 minibatches from 1e-3: 5e-4 after 60 steps, exactly 0 after 120, never below."""
    rates = [1e-3 * learning_rate_factor(done / 12, step=1 / 12, total=10, schedule="linear") for done in range(125)]
    assert rates[0] == 1e-3
    assert rates[60] == pytest.approx(5e-4, rel=1e-12)
    assert rates[120] == 0.0 and min(rates) == 0.0


def test_warmup_starts_above_zero_and_reaches_the_base_rate_with_its_last_step() -> None:
    factors = [learning_rate_factor(done / 4, step=1 / 4, total=10, warmup=2) for done in range(10)]
    assert factors[:8] == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1.0])
    assert factors[8:] == [1.0, 1.0]


def test_decay_begins_after_the_warmup() -> None:
    assert learning_rate_factor(6.0, step=0.5, total=10, warmup=2, schedule="linear") == pytest.approx(0.5)


def test_cosine_and_the_floor() -> None:
    assert learning_rate_factor(5, step=1, total=10, schedule="cosine") == pytest.approx(0.5)
    assert learning_rate_factor(2.5, step=1, total=10, schedule="cosine") == pytest.approx(0.853553, abs=1e-6)
    assert learning_rate_factor(10, step=1, total=10, schedule="cosine", final=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(("schedule", "share"), [("linear", 0.75), ("cosine", 0.5 * (1 + math.cos(math.pi / 4)))])
def test_the_floor_is_mixed_with_what_is_left(schedule: Schedule, share: float) -> None:
    """A quarter of the decay is done: 0.1 + 0.9 x share."""
    found = learning_rate_factor(4.0, step=0.5, total=10, warmup=2, schedule=schedule, final=0.1)
    assert found == pytest.approx(0.1 + 0.9 * share, rel=1e-12)


def test_a_warmup_as_long_as_the_run_ends_in_the_decayed_rate() -> None:
    assert learning_rate_factor(9.5, step=0.25, total=10, warmup=10) == pytest.approx(0.975)
    assert learning_rate_factor(10.0, step=0.25, total=10, warmup=10, schedule="linear") == 1.0
    assert learning_rate_factor(10.25, step=0.25, total=10, warmup=10, schedule="linear", final=0.2) == 0.2
