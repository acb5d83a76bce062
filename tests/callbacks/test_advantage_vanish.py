"""AdvantageVanish: a batch without a signal is left out, although whitening would scale its noise up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks import AdvantageVanish
from lightning_rlhf.control import Control
from lightning_rlhf.rewards import RewardBatch
from tests.support import (
    DecisionLog,
    Recorder,
    experience_stats,
    fit,
    resume_equals_whole,
    same,
    tiny_module,
    tiny_policy,
    weights,
)

CONSTANT: dict[str, Any] = {"advantage": {"estimator": "reinforce_plus_plus", "whiten": True}}


def nearly_nothing(batch: RewardBatch) -> list[float]:
    return [1e-4 * (len(text) % 2) for text in batch.responses]


def weak(iterations: int) -> Any:
    return tiny_module(
        policy=tiny_policy(critic="none", reference="none"), iterations=iterations, reward=nearly_nothing, **CONSTANT
    )


def test_nothing_is_trained_and_it_is_said_why() -> None:
    module, recorder, log = weak(2), Recorder(), DecisionLog()
    before = weights(module)
    trainer = fit(module, [AdvantageVanish(0.01, relative=False), recorder], logger=log)
    [(experience, stats), _] = recorder.of("on_experience_ready")
    assert stats.advantage_abs_mean > 0.1 > 0.01 > stats.advantage_raw_abs_mean > 0, "whitening hides how weak it is"
    # Without a KL penalty and a discount every token has the score of its response, none of which is negative.
    lengths = experience.response_lengths
    mean = float((experience.rewards.double() * lengths).sum() / lengths.sum())
    assert stats.advantage_raw_abs_mean == pytest.approx(mean, rel=1e-5)
    assert same(before, weights(module)) and trainer.callback_metrics["ppo/epochs_used"] == 0
    assert [iteration for iteration, _ in log.of("stop_epochs")] == [1, 2]
    assert "under 0.01" in log.of("stop_epochs")[0][1]


def test_without_it_noise_is_trained_on() -> None:
    module = weak(1)
    before = weights(module)
    fit(module)
    assert not same(before, weights(module))


def test_a_signal_passes() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1), [AdvantageVanish(0.01), recorder])
    assert recorder.of("on_update_end")[0].epochs_used == 2


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    resume_equals_whole(tmp_path, lambda: [AdvantageVanish()], lambda: tiny_module(iterations=4))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_usual_size_is_found_in_the_run_whatever_the_unit_of_the_reward(scale: float) -> None:
    """2, 1, 3, 2: the usual is 2, and a batch under 0.02 is left out; those left out do not lower the usual."""
    callback, control = AdvantageVanish(0.01), Control()
    left_out = []
    for i, size in enumerate((2.0, 1.0, 3.0, 2.0, 0.019, 0.019, 0.021, 0.0)):
        callback.on_experience_ready(
            None,  # type: ignore[arg-type]
            SimpleNamespace(control=control),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            experience_stats(advantage_raw_abs_mean=scale * size),
        )
        if control.take("stop_epochs"):
            left_out.append(i)
    assert left_out == [4, 5, 7]
    assert callback.sizes == pytest.approx([scale * size for size in (2.0, 1.0, 3.0, 2.0, 0.021)])


@pytest.mark.parametrize("threshold", [0, -1, float("inf")])
def test_bad_settings_are_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"callbacks.advantage_vanish.threshold = .* is not allowed"):
        AdvantageVanish(threshold)
