"""KLEarlyStop: epochs, steps and runs that end on KL, on a real run in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import KLEarlyStop
from lightning_rlhf.control import TrainingFailed
from tests.support import (
    FAST,
    DecisionLog,
    Recorder,
    fit,
    moments,
    resume_equals_whole,
    same,
    tiny_module,
    update_stats,
    weights,
)


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
    with pytest.raises(TrainingFailed, match=r"iteration 2: kl/old over 1\.5 x 0\.0001 in 2 iterations in a row"):
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


def test_the_rollback_returns_moments_as_well_bitwise() -> None:
    """Iteration 1 runs to its end under a high limit; iteration 2 is rolled back."""

    class Later(KLEarlyStop):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
            if stats.iteration == 2:
                self.before = weights(module), moments(module)
                self.hard_limit = 1e-6

    module, log = tiny_module(iterations=2, **FAST), DecisionLog()
    callback = Later(target=10.0, hard_limit=1e3, rollback=True)
    fit(module, [callback], logger=log)
    assert same(callback.before[0], weights(module)) and same(callback.before[1], moments(module))
    [(iteration, reason)] = log.of("rollback")
    assert iteration == 2 and "over hard limit 1e-06 in epoch 0" in reason


def test_the_hard_limit_is_judged_per_minibatch_but_never_before_the_first_step() -> None:
    recorder = Recorder()
    module = tiny_module(iterations=3, kl={"estimator": "k3"}, **FAST)
    fit(module, [KLEarlyStop(target=1e3, per_minibatch=True, hard_limit=1e-4), recorder])
    seen = [(s.iteration, s.epoch, s.minibatch, s.stepped) for s in recorder.of("on_minibatch_end")]
    assert seen == [(i, 0, m, m == 0) for i in (1, 2, 3) for m in (0, 1)], "a run over the limit can still come back"


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [callback] = resume_equals_whole(
        tmp_path, lambda: [KLEarlyStop(target=1e-4, patience=50)], lambda: tiny_module(iterations=4, **FAST)
    )
    assert callback.over_target == 4


def test_the_command_says_a_decision_once(tiny_run: list[str], tmp_path: Path) -> None:
    """Lightning's own handler and Hydra's would each show it. A process of its own: nothing is imported before."""
    command = [sys.executable, "-m", "lightning_rlhf.cli", "train", *tiny_run, "logger=none"]
    command += ["callbacks=kl_early_stop", "callbacks.kl_early_stop.target=1e-12", "module.update.minibatch_size=2"]
    command += ["iterations=2", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for said in (done.stdout + done.stderr, (tmp_path / "run" / "train.log").read_text(encoding="utf-8")):
        for iteration in (1, 2):
            assert said.count(f"iteration {iteration}: stop_epochs: kl/old ") == 1
