"""LRBackoff: broken iterations lower the learning rate, and unbroken ones raise it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import AdvantageVanish, KLEarlyStop, LRBackoff, RLHFCallback
from tests.support import FAST, DecisionLog, fit, resume_equals_whole, tiny_module


class Breaks(RLHFCallback):
    """Ends the epochs of the given iterations."""

    def __init__(self, *iterations: int) -> None:
        self.iterations = iterations

    def on_ppo_epoch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration in self.iterations:
            module.control.stop_epochs("told to")


class Scales(RLHFCallback):
    """The learning-rate scale of every iteration, and the rate that the optimiser used."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.rates: list[float] = []

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.seen.append(module.control.value("lr_scale"))

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        if (stats.epoch, stats.minibatch) == (0, 0):
            self.rates.append(module.optimizers().param_groups[0]["lr"])


def test_it_halves_after_patience_and_recovers_slowly() -> None:
    scales, log = Scales(), DecisionLog()
    module = tiny_module(iterations=7, actor={"lr": 1e-3})
    trainer = fit(module, [Breaks(1, 2, 4, 5), LRBackoff(patience=2, recovery=1.5), scales], logger=log)
    # Broken 1, 2: halved. Calm 3: x 1.5. Broken 4, 5: halved. Calm 6, 7: x 1.5, bounded by 1.
    assert scales.seen == pytest.approx([1, 1, 0.5, 0.75, 0.75, 0.375, 0.5625])
    assert scales.rates == pytest.approx([1e-3 * scale for scale in scales.seen])
    assert log.of("lower_learning_rate") == [
        (2, "epochs broken in 2 iterations in a row: scale 1 -> 0.5"),
        (5, "epochs broken in 2 iterations in a row: scale 0.75 -> 0.375"),
    ]
    assert trainer.callback_metrics["stability/learning_rate_cuts"] == 2


def test_with_a_real_brake_and_its_bound() -> None:
    module = tiny_module(iterations=4, **FAST)
    fit(module, [KLEarlyStop(target=1e-6), LRBackoff(patience=1, minimum=0.2)])
    assert module.control.value("lr_scale") == 0.2


def test_a_batch_that_was_left_out_is_not_broken() -> None:
    module = tiny_module(iterations=3)
    fit(module, [AdvantageVanish(threshold=1e6, relative=False), LRBackoff(patience=1)])
    assert module.control.counts["stop_epochs"] == 3 and module.control.value("lr_scale") == 1.0


class Undoes(RLHFCallback):
    """Undoes in an iteration the update of the one before, and trains nothing."""

    rollback_scopes = frozenset({"actor"})

    def __init__(self, *iterations: int) -> None:
        self.iterations = iterations

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
        if stats.iteration in self.iterations:
            module.control.stop_epochs("told to")
            module.control.rollback("told to", to="actor")


def test_an_update_that_the_next_iteration_undoes_counts_as_broken() -> None:
    """Every second iteration undoes the one before: the rate would never fall if undone ones counted as unbroken."""
    log = DecisionLog()
    module = tiny_module(iterations=5)
    fit(module, [Undoes(2, 4), LRBackoff(patience=2, recovery=1.0)], logger=log)
    assert [iteration for iteration, _ in log.of("lower_learning_rate")] == [4]


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [_, callback] = resume_equals_whole(
        tmp_path, lambda: [Breaks(1, 2, 3), LRBackoff(patience=3)], lambda: tiny_module(iterations=4)
    )
    assert callback.broken == 0


@pytest.mark.parametrize(
    ("name", "value"), [("patience", 0), ("factor", 1.0), ("factor", 0), ("recovery", 0.9), ("minimum", 0)]
)
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.lr_backoff.{name} = {value} is not allowed"):
        LRBackoff(**{name: value})
