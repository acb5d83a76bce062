"""The shipped callbacks: what each decides, alone, on a real run in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import AdaptiveKL, GradientMonitor, KLEarlyStop, SamplesTable
from lightning_rlhf.events import EpochStats, MinibatchStats, UpdateStats
from lightning_rlhf.module import PPOModule
from tests.support import Recorder, fit, same, tiny_module, tiny_policy, weights

FAST = {"actor": {"lr": 3e-2, "clip_norm": None}, "update": {"epochs": 4, "minibatch_size": 8}}
"""Large steps: the KL is over any reasonable target after one epoch."""


# --- KLEarlyStop -------------------------------------------------------------------------------------------------


def test_an_epoch_over_the_target_is_the_last_one() -> None:
    recorder = Recorder()
    module = tiny_module(iterations=1, **FAST)
    fit(module, [KLEarlyStop(target=0.02), recorder])
    epochs = recorder.of("on_ppo_epoch_end")
    assert epochs[-1].kl_old > 0.02 and len(epochs) < 4
    assert all(stats.kl_old <= 0.02 for stats in epochs[:-1])
    [decision] = module.control.decisions
    assert decision.verb == "stop_epochs" and "over target 0.02" in decision.reason


def test_a_small_kl_uses_every_epoch() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1, actor={"lr": 1e-6}, update={"epochs": 4}), [KLEarlyStop(), recorder])
    assert [stats.epochs_used for stats in recorder.of("on_update_end")] == [4]


def test_per_minibatch_it_is_judged_before_the_step() -> None:
    recorder = Recorder()
    fit(tiny_module(iterations=1, **FAST), [KLEarlyStop(target=0.02, per_minibatch=True), recorder])
    stats = recorder.of("on_minibatch_end")
    assert stats[-1].kl_old > 0.02 and not stats[-1].stepped
    assert all(s.kl_old <= 0.02 and s.stepped for s in stats[:-1]) and len(stats) < 8


def test_the_hard_limit_returns_to_the_weights_before_the_batch() -> None:
    module = tiny_module(iterations=1, **FAST)
    before = weights(module)
    trainer = fit(module, [KLEarlyStop(target=10.0, hard_limit=1e-4, rollback=True)])
    assert same(before, weights(module))
    assert trainer.callback_metrics["stability/rollbacks"] == 1 and trainer.callback_metrics["ppo/epochs_used"] == 1


def test_without_rollback_the_hard_limit_only_ends_the_epochs() -> None:
    module = tiny_module(iterations=1, **FAST)
    before = weights(module)
    callback = KLEarlyStop(target=10.0, hard_limit=1e-4)
    assert not callback.rollback_scopes, "no copy of the weights is paid for"
    trainer = fit(module, [callback])
    assert not same(before, weights(module)) and trainer.callback_metrics["ppo/epochs_used"] == 1


def test_patience_stops_the_run_and_is_kept_in_checkpoints() -> None:
    module = tiny_module(iterations=6, **FAST)
    fit(module, [KLEarlyStop(target=1e-4, patience=2)])
    assert module.control.iteration == 2 and "2 iterations in a row" in (module.control.training_stopped or "")
    callback, resumed = KLEarlyStop(target=0.02, patience=3), KLEarlyStop(target=0.02, patience=3)
    callback.on_update_end(None, module, update_stats(kl_old=0.04))  # type: ignore[arg-type]
    resumed.load_state_dict(callback.state_dict())
    assert resumed.over_target == 1
    resumed.on_update_end(None, module, update_stats(kl_old=0.03))  # type: ignore[arg-type]
    assert resumed.over_target == 0, "1.5 x 0.02 is not over it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": -0.1}, r"callbacks.kl_early_stop.target = -0.1"),
        ({"patience": 0}, r"callbacks.kl_early_stop.patience = 0"),
        ({"rollback": True}, r"needs callbacks.kl_early_stop.hard_limit"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLEarlyStop(**arguments)


# --- GradientMonitor ---------------------------------------------------------------------------------------------


class Control:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reported: dict[str, float] = {}

    def report(self, name: str, value: float) -> None:
        self.reported[name] = value

    def stop_training(self, reason: str) -> None:
        self.calls.append(reason)

    def stop_epochs(self, reason: str) -> None:
        self.calls.append(reason)


class Told:
    """What the monitor sees of a module, with hand-made gradients."""

    def __init__(self, limit: float | None = 1.0) -> None:
        self.control, self.limit = Control(), limit

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"name": "actor", "clip_norm": self.limit}]


def minibatch_stats(norm: float = 0.5, *, clipped: bool = False, finite: bool = True) -> MinibatchStats:
    return MinibatchStats(
        iteration=1, update=0, epoch=0, minibatch=0, tokens=1.0, policy_loss=0.0, value_loss=0.0, kl_old=0.0,
        kl_ref=0.0, clip_fraction=0.0, ratio_max=1.0, grad_norms={"actor": norm}, clipped={"actor": clipped},
        finite=finite, stepped=finite,
    )  # fmt: skip


def update_stats(kl_old: float = 0.0) -> UpdateStats:
    return UpdateStats(
        iteration=1, epochs_used=1, steps=1, steps_skipped=0, kl_old=kl_old, kl_ref=0.0, clip_fraction=0.0
    )


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
    with pytest.warns(UserWarning, match="not finite"):
        trainer = fit(module, [GradientMonitor(max_nonfinite=2)])
    assert module.control.iteration == 2 and trainer.callback_metrics["grad_norm/actor_average"] > 0
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


# --- SamplesTable ------------------------------------------------------------------------------------------------


def test_samples_go_from_the_worst_to_the_best_and_to_every_logger_that_takes_them(tmp_path: Path) -> None:
    fit(tiny_module(iterations=3), [SamplesTable(every_n_iterations=2, rows=4)], folder=tmp_path)
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["iteration_000001.jsonl", "iteration_000002.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "samples" / files[0]).read_text().splitlines()]
    assert len(rows) == 4 and [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    assert rows[0]["prompt"].endswith("=") and rows[0]["finish"] in ("natural", "truncated")
    assert rows[0]["kl_ref"] == pytest.approx(0.0, abs=1e-4) and rows[0]["tokens"] >= 1


# --- AdaptiveKL --------------------------------------------------------------------------------------------------


def test_the_coefficient_follows_the_kl_once_per_iteration() -> None:
    """Below the target the error is clipped at -0.2: beta x (1 - 0.2 x 16 sequences / horizon 160) per iteration."""
    module = tiny_module(iterations=2, actor={"lr": 1e-6}, kl={"coefficient": 0.1})
    fit(module, [AdaptiveKL(target=5.0, horizon=160)])
    assert module.control.value("kl_coefficient") == pytest.approx(0.1 * 0.98 * 0.98)


def test_two_owners_of_one_knob_are_refused() -> None:
    class Other(AdaptiveKL):
        pass

    with pytest.raises(ValueError, match="already belongs to AdaptiveKL; Other cannot own it"):
        fit(tiny_module(iterations=1), [AdaptiveKL(), Other()])


@pytest.mark.parametrize(("name", "value"), [("target", 0), ("target", -1), ("horizon", 0)])
def test_a_controller_without_target_or_horizon_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.adaptive_kl.{name} = {value}"):
        AdaptiveKL(**{name: value})


def test_callbacks_work_together_and_with_any_policy(tmp_path: Path) -> None:
    for policy in (tiny_policy(critic="none", reference="none"), tiny_policy(critic="shared")):
        blocks: dict[str, Any] = {} if policy.critic else {"advantage": {"estimator": "rloo"}}
        module = tiny_module(policy=policy, iterations=2, **blocks)
        fit(module, [GradientMonitor(), KLEarlyStop(hard_limit=5.0), SamplesTable()], folder=tmp_path)
        assert module.control.iteration == 2


def test_epoch_stats_are_weighted_by_tokens() -> None:
    from lightning_rlhf.update import _epoch_stats

    stats = [minibatch_stats() for _ in range(2)]
    pair = [
        stats[0].__class__(**{**vars(stats[0]), "tokens": 1.0, "kl_old": 0.4, "ratio_max": 1.1}),
        stats[0].__class__(**{**vars(stats[1]), "tokens": 3.0, "kl_old": 0.0, "ratio_max": 1.5}),
    ]
    result = _epoch_stats(pair)
    assert isinstance(result, EpochStats) and result.kl_old == pytest.approx(0.1) and result.ratio_max == 1.5
