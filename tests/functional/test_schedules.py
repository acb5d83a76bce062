"""Learning-rate schedules: exact values at exact points of the run."""

from __future__ import annotations

import pytest

from lightning_rlhf.functional.schedules import learning_rate_factor


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
