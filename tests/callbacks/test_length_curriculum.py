"""LengthCurriculum: responses grow over the first iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import LengthCurriculum
from tests.support import DecisionLog, Recorder, fit, resume_equals_whole, tiny_module


def test_the_limit_grows_linearly_to_the_configured_length() -> None:
    """2 tokens in iteration 1, 10 from iteration 5 on: 2 + 8 x (i - 1) / 4."""
    recorder = Recorder()
    module = tiny_module(iterations=6, max_new_tokens=10)
    trainer = fit(module, [LengthCurriculum(start=2, iterations=4, max_truncated=None), recorder])
    longest = [int(rollout.response_lengths.max()) for rollout in recorder.of("on_rollout_end")]
    assert longest == [2, 4, 6, 8, 10, 10]
    assert trainer.callback_metrics["knob/max_new_tokens"] == 10


def test_where_it_cuts_answers_off_it_grows_by_half_at_once() -> None:
    """An untrained model ends few of its answers: half of 10 tokens, then 8, then 10."""
    recorder, log = Recorder(), DecisionLog()
    fit(tiny_module(iterations=4, max_new_tokens=10), [LengthCurriculum(start=0.5), recorder], logger=log)
    longest = [int(rollout.response_lengths.max()) for rollout in recorder.of("on_rollout_end")]
    assert longest == [5, 8, 10, 10]
    [(_, reason), _] = log.of("lengthen_responses")
    assert reason.endswith("cut at 5 tokens, over 10%: at least 8 now")


def test_without_it_responses_are_long_from_the_start() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1, max_new_tokens=10), [recorder])
    assert int(recorder.of("on_rollout_end")[0].response_lengths.max()) == 10


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    resume_equals_whole(
        tmp_path, lambda: [LengthCurriculum(start=2, iterations=3)], lambda: tiny_module(iterations=4, max_new_tokens=8)
    )


@pytest.mark.parametrize(("name", "value"), [("start", 0), ("iterations", 0), ("start", 1.5), ("iterations", True)])
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"callbacks.length_curriculum.{name} = {value} is not allowed: a whole number"
    ):
        LengthCurriculum(**{name: value})


def test_a_start_beyond_the_configured_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start = 9 is not allowed: at most rollout.max_new_tokens = 8"):
        fit(tiny_module(iterations=1, max_new_tokens=8), [LengthCurriculum(start=9)])
