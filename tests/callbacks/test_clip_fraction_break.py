"""ClipFractionBreak: epochs end where most tokens are clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import ClipFractionBreak
from tests.support import DecisionLog, Recorder, fit, resume_equals_whole, tiny_module

NARROW: dict[str, Any] = {
    "loss": {"clip_low": 1e-6, "clip_high": 1e-6},
    "update": {"epochs": 4, "minibatch_size": 8},
}
"""A clip range so narrow that every token that moved the right way is clipped."""


def test_the_epoch_over_the_limit_is_the_last_and_how_many_each_batch_got_is_logged() -> None:
    recorder, log = Recorder(), DecisionLog()
    trainer = fit(tiny_module(iterations=2, **NARROW), [ClipFractionBreak(limit=0.5), recorder], logger=log)
    used = [stats.epochs_used for stats in recorder.of("on_update_end")]
    assert all(count < 4 for count in used) and trainer.callback_metrics["ppo/epochs_used"] == used[-1]
    for iteration, count in enumerate(used, start=1):
        *within, last = [stats for stats in recorder.of("on_ppo_epoch_end") if stats.iteration == iteration]
        assert last.epoch == count - 1 and last.clip_fraction > 0.5
        assert within and all(stats.clip_fraction <= 0.5 for stats in within), "an epoch under the limit ends nothing"
    assert [iteration for iteration, _ in log.of("stop_epochs")] == [1, 2]
    assert all("over 0.5 in epoch" in reason for _, reason in log.of("stop_epochs"))


def test_without_it_every_epoch_is_used() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1, **NARROW), [recorder])
    assert [stats.epochs_used for stats in recorder.of("on_update_end")] == [4]


def test_per_minibatch_the_step_is_not_taken() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1, **NARROW), [ClipFractionBreak(limit=0.2, per_minibatch=True), recorder])
    *taken, last = recorder.of("on_minibatch_end")
    assert last.clip_fraction > 0.2 and not last.stepped
    assert taken and all(stats.stepped and stats.clip_fraction <= 0.2 for stats in taken)


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    resume_equals_whole(tmp_path, lambda: [ClipFractionBreak(0.2)], lambda: tiny_module(iterations=4, **NARROW))


@pytest.mark.parametrize("limit", [0, 1, -0.5, float("nan"), True, "0.5"])
def test_bad_settings_are_refused(limit: Any) -> None:
    with pytest.raises(
        ValueError, match=r"callbacks.clip_fraction_break.limit = .* is not allowed: a finite number > 0"
    ):
        ClipFractionBreak(limit)
