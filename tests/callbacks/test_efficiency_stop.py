"""EfficiencyStop: a run that has converged ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import EfficiencyStop
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from tests.support import Recorder, fit, resume_equals_whole, tiny_module


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


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [callback] = resume_equals_whole(tmp_path, lambda: [EfficiencyStop(window=3)], lambda: tiny_module(iterations=4))
    assert len(callback.scores) == len(callback.kls) == 4


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("min_improvement", 0), ("kl_tolerance", -0.1)])
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.efficiency_stop.{name} = {value} is not allowed"):
        EfficiencyStop(**{name: value})
