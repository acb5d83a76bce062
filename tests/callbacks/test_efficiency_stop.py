"""EfficiencyStop: a run that has converged ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks import EfficiencyStop
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.control import Control
from tests.support import Recorder, experience_stats, fit, resume_equals_whole, tiny_module


def test_a_run_whose_score_stands_still_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """A constant reward and no learning rate: after two windows of two iterations nothing has changed."""
    module = tiny_module(iterations=9, reward=lambda batch: [0.5] * len(batch.responses), actor={"lr": 1e-12})
    checkpoint = IterationCheckpoint(str(tmp_path), every_n_iterations=100)
    fit(module, [EfficiencyStop(window=2), RNGState(), checkpoint], folder=tmp_path, enable_checkpointing=True)
    assert module.control.iteration == 4
    assert "converged: over 2 iterations the mean score rose by 0.0000" in str(module.control.training_stopped)
    assert (tmp_path / "iteration_000004.ckpt").is_file()


def test_a_policy_that_still_moves_goes_on() -> None:
    module = tiny_module(iterations=6, reward=lambda batch: [0.5] * len(batch.responses), actor={"lr": 3e-2})
    fit(module, [EfficiencyStop(window=2, kl_tolerance=1e-9)])
    assert module.control.iteration == 6 and module.control.training_stopped is None


def test_a_score_that_rises_goes_on() -> None:
    rising = iter(range(100))
    module = tiny_module(
        iterations=6, reward=lambda batch: [0.1 * next(rising)] * len(batch.responses), actor={"lr": 1e-12}
    )
    recorder = Recorder()
    fit(module, [EfficiencyStop(window=2), recorder])
    assert module.control.iteration == 6


def stopped_at(callback: EfficiencyStop, points: Sequence[tuple[float, float]]) -> int | None:
    """The iteration after which a run with these scores and KL ends; no model is trained."""
    control = Control()
    module: Any = SimpleNamespace(control=control, reference=object())
    for i, (score, kl) in enumerate(points, start=1):
        stats = experience_stats(score_mean=score, kl_ref=kl)
        callback.on_experience_ready(None, module, None, stats)  # type: ignore[arg-type]
        if control.training_stopped:
            return i
    return None


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_a_slow_run_goes_on_and_one_that_stands_still_ends_whatever_the_unit(unit: float) -> None:
    """Score and KL rise by 0.004 in 20 iterations; absolute limits of 0.01 take that for the end."""
    slow = [(unit * 2e-4 * i, 2e-4 * i) for i in range(100)]
    assert stopped_at(EfficiencyStop(), slow) is None
    still = [*slow, *[slow[-1]] * 60]
    assert stopped_at(EfficiencyStop(), still) == 134, "once both windows hold little else"
    if unit == 1.0:
        assert stopped_at(EfficiencyStop(relative=False), slow) == 40


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [callback] = resume_equals_whole(tmp_path, lambda: [EfficiencyStop(window=3)], lambda: tiny_module(iterations=4))
    assert len(callback.scores) == len(callback.kls) == 4


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("min_improvement", 0), ("kl_tolerance", -0.1)])
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.efficiency_stop.{name} = {value} is not allowed"):
        EfficiencyStop(**{name: value})
