"""GradientMonitor: averages, diagnoses, and an end to runs whose gradients are broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import GradientMonitor
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.ppo import PPOModule
from tests.support import fit, minibatch_stats, resume_equals_whole, same, tiny_module, update_stats, weights


class Control:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reported: dict[str, float] = {}

    def report(self, name: str, value: float) -> None:
        self.reported[name] = value

    def stop_training(self, reason: str, *, failed: bool) -> None:
        assert failed
        self.calls.append(reason)

    def stop_epochs(self, reason: str) -> None:
        self.calls.append(reason)


class Told:
    """What the monitor sees of a module, with hand-made gradients."""

    def __init__(self, limit: float | None = 1.0) -> None:
        self.control, self.limit = Control(), limit

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"name": "actor", "clip_norm": self.limit}]


def test_averages_are_exponential_and_unbiased_from_the_first_step() -> None:
    monitor, module = GradientMonitor(decay=0.5), Told()
    for norm, clipped in ((4.0, True), (2.0, True), (1.0, False)):
        monitor.on_minibatch_end(None, module, minibatch_stats(norm, clipped=clipped))  # type: ignore[arg-type]
    monitor.on_update_end(None, module, update_stats())  # type: ignore[arg-type]
    # 4; then (4 + 2) / 2 = 3; then 0.5 x 3 + 0.5 x 1 = 2. Clipped: 1, 1, 0.5.
    assert module.control.reported == {"grad_norm/actor_average": 2.0, "grad_clipped/actor_average": 0.5}
    restored = GradientMonitor(decay=0.5)
    restored.load_state_dict(monitor.state_dict())
    assert restored.state_dict() == monitor.state_dict()


def test_a_minibatch_rejected_as_a_whole_is_no_step_and_resets_nothing() -> None:
    monitor, module = GradientMonitor(decay=0.5, max_nonfinite=2), Told()
    empty = replace(minibatch_stats(0.0), tokens=0.0, stepped=False)
    for stats in (minibatch_stats(4.0), empty, minibatch_stats(finite=False), empty):
        monitor.on_minibatch_end(None, module, stats)  # type: ignore[arg-type]
    assert monitor.norms == {"actor": 4.0} and monitor.nonfinite == 1


def test_gradients_that_stay_broken_end_the_run_and_a_good_one_resets() -> None:
    monitor, module = GradientMonitor(max_nonfinite=3), Told()
    for finite in (False, False, True, False, False):
        monitor.on_minibatch_end(None, module, minibatch_stats(finite=finite))  # type: ignore[arg-type]
    assert module.control.calls == []
    monitor.on_minibatch_end(None, module, minibatch_stats(finite=False))  # type: ignore[arg-type]
    assert module.control.calls[0] == "loss or gradient not finite in 3 steps in a row"


@pytest.mark.parametrize(
    ("norm", "clipped", "message"),
    [(9.0, True, r"of recent actor steps were clipped"), (1e-4, False, r"far under its limit 1.0")],
)
def test_both_diagnoses_are_said_once(norm: float, clipped: bool, message: str) -> None:
    monitor, module = GradientMonitor(decay=0.5), Told()
    for _ in range(4):
        monitor.on_minibatch_end(None, module, minibatch_stats(norm, clipped=clipped))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=message) as caught:
        monitor.on_update_end(None, module, update_stats())  # type: ignore[arg-type]
        monitor.on_update_end(None, module, update_stats())  # type: ignore[arg-type]
    assert len(caught) == 1


def test_a_real_run_logs_the_averages_and_stops_on_nan() -> None:
    class Poisoned(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            loss = super().micro_batch_loss(micro, metrics)
            return loss * float("nan") if self.control.iteration == 2 else loss

    module = tiny_module(cls=Poisoned, iterations=5)
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(TrainingFailed, match="iteration 2"):
        fit(module, [GradientMonitor(max_nonfinite=2)])
    assert module.control.iteration == 2 and module.trainer.callback_metrics["grad_norm/actor_average"] > 0
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


def test_the_diagnosis_of_a_real_run_with_a_tiny_limit() -> None:
    module = tiny_module(iterations=3, actor={"lr": 1e-3, "clip_norm": 1e-6})
    with pytest.warns(UserWarning, match=r"100% of recent actor steps were clipped: lower module.actor.lr"):
        trainer = fit(module, [GradientMonitor(decay=0.5)])
    assert trainer.callback_metrics["grad_clipped/actor_average"] == 1.0


def test_limits_of_actor_and_critic_are_their_own() -> None:
    module = tiny_module(iterations=1, actor={"clip_norm": 1e-6}, critic={"clip_norm": 1e6})
    metrics = fit(module, [GradientMonitor()]).callback_metrics
    assert metrics["grad_clipped/actor"] == 1.0 and metrics["grad_clipped/critic"] == 0.0


def test_a_broken_gradient_under_a_finite_loss_moves_nothing_not_even_the_schedule() -> None:
    class Broken(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            loss = super().micro_batch_loss(micro, metrics)
            loss.register_hook(lambda gradient: gradient * float("nan"))
            return loss

    module = tiny_module(cls=Broken, iterations=2, optimizer={"schedule": "linear", "final_lr_fraction": 0.0})
    before = weights(module)
    with pytest.warns(UserWarning, match="not finite"):
        trainer = fit(module, [GradientMonitor(max_nonfinite=50)])
    assert same(before, weights(module)) and not module.optimizers().optimizer.state
    assert trainer.callback_metrics["stability/nonfinite_steps"] == 8 and trainer.global_step == 0
    assert trainer.callback_metrics["lr/actor"] == 0.0, "the schedule follows iterations and ends where it should"


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [monitor] = resume_equals_whole(tmp_path, lambda: [GradientMonitor()], lambda: tiny_module(iterations=4))
    assert monitor.steps == 16


@pytest.mark.parametrize(
    ("name", "value"), [("decay", 1.0), ("max_nonfinite", 0), ("warn_clipped", 0), ("warn_far_below", 1.5)]
)
def test_bad_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.gradient_monitor.{name} = {value}.* is not allowed"):
        GradientMonitor(**{name: value})
