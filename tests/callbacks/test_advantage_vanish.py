"""AdvantageVanish: a batch without a signal is left out, although whitening would blow its noise up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import AdvantageVanish
from lightning_rlhf.rewards import RewardBatch
from tests.support import DecisionLog, Recorder, fit, resume_equals_whole, same, tiny_module, tiny_policy, weights

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
    trainer = fit(module, [AdvantageVanish(0.01), recorder], logger=log)
    [(experience, stats), _] = recorder.of("on_experience_ready")
    assert stats.advantage_abs_mean > 0.1 > 0.01 > stats.advantage_raw_abs_mean > 0, "whitening hides how weak it is"
    assert stats.advantage_raw_abs_mean == pytest.approx(float(experience.rewards.repeat_interleave(1).mean()), rel=2.0)
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
    resume_equals_whole(tmp_path, lambda: [AdvantageVanish()], lambda: weak(4))


@pytest.mark.parametrize("threshold", [0, -1, float("inf")])
def test_bad_settings_are_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"callbacks.advantage_vanish.threshold = .* is not allowed"):
        AdvantageVanish(threshold)
