"""The logged value of a knob is the one applied in the iteration, not the one a callback has set for the next."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.callbacks import AdaptiveKL, KLGuard, LengthCurriculum, LRBackoff, RLHFCallback
from tests.support import fit, tiny_module


class Watch(RLHFCallback):
    """Every knob during the update, the actor's learning rate at a step, and the values logged afterwards."""

    def __init__(self) -> None:
        self.applied: list[dict[str, float]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        if (stats.epoch, stats.minibatch) == (0, 0):
            self.applied.append({f"knob/{name}": module.control.value(name) for name in module.control.knobs})

    def on_ppo_epoch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        module.control.stop_epochs("so that the learning rate is lowered")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_coefficient_is_logged_with_the_iteration_it_acted_in() -> None:
    """0.1, and for the next iteration 0.1 x (1 - 0.2 x 16 sequences / 50) = 0.0936."""
    watch = Watch()
    module = tiny_module(iterations=2, actor={"lr": 1e-6}, kl={"coefficient": 0.1})
    fit(module, [AdaptiveKL(target=5.0, mode="proportional", horizon=50, figure_every=None), watch])
    assert [row["kl/coefficient"] for row in watch.logged] == pytest.approx([0.1, 0.0936])
    assert module.control.value("kl_coefficient") == pytest.approx(0.0936 * 0.936)


def test_every_knob_is_logged_as_it_acted() -> None:
    watch = Watch()
    module = tiny_module(iterations=4, max_new_tokens=8, kl={"coefficient": 0.1, "estimator": "k3"})
    brakes = [KLGuard(target=1e-9, hard=1e12, jump=None), AdaptiveKL(target=1e-3, figure_every=None)]
    fit(module, [*brakes, watch, LRBackoff(patience=1), LengthCurriculum(start=2, iterations=3)])
    for applied, logged in zip(watch.applied, watch.logged, strict=True):
        assert {name: logged[name] for name in applied} == pytest.approx(applied)
        assert logged["kl/coefficient"] == logged["knob/kl_coefficient"]
    assert [row["knob/lr_scale"] for row in watch.logged] == pytest.approx([1, 0.5, 0.25, 0.125])
    multipliers = [row.get("stability/kl_coefficient_multiplier", 1.0) for row in watch.logged]
    assert multipliers[0] == 1.0 and multipliers[-1] > 1.0
