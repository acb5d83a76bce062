"""Not measured is not zero: after an iteration whose tokens were all rejected no controller changes its state."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_rlhf.callbacks import (
    AdaptiveKL,
    AdvantageVanish,
    ClipFractionBreak,
    EfficiencyStop,
    GradientMonitor,
    KLEarlyStop,
    KLGuard,
    LengthCurriculum,
    LRBackoff,
    RLHFCallback,
)
from lightning_rlhf.control import Control
from lightning_rlhf.events import EpochStats, ExperienceStats, UpdateStats
from tests.support import experience_stats, minibatch_stats

NAN = math.nan


def controllers() -> list[RLHFCallback]:
    return [
        *(AdaptiveKL(0.1, mode=mode, smoothing=0.0, minimum=0.001) for mode in ("pid", "doubling", "proportional")),
        *(KLGuard(target=0.1), KLGuard(), KLEarlyStop(0.1, per_minibatch=True, hard_limit=1.0, patience=3)),
        *(AdvantageVanish(), AdvantageVanish(relative=False), ClipFractionBreak(per_minibatch=True)),
        *(EfficiencyStop(window=1), EfficiencyStop(window=1, relative=False), GradientMonitor(), LRBackoff()),
        LengthCurriculum(start=2, iterations=4),
    ]


def module_of(control: Control) -> Any:
    control.register("kl_coefficient", 0.5)
    control.register("lr_scale", 0.5)
    control.register("max_new_tokens", 8, integer=True)
    groups = [{"name": "actor", "clip_norm": 1.0}]
    return SimpleNamespace(control=control, reference=object(), parameter_groups=lambda: groups)


def iterate(callback: Any, module: Any, samples: ExperienceStats, *, trained: bool) -> None:
    """The events of one iteration; of one that was not trained on, those of an update without a minibatch."""
    control, nothing = module.control, None
    control.begin_iteration(control.iteration + 1)
    with control.allow("skip_step", "rollback"):
        callback.on_experience_ready(nothing, module, nothing, samples)
        if trained:
            stats = replace(minibatch_stats(), kl_old=0.3, kl_ref=0.4, clip_fraction=0.6)
            callback.on_before_step(nothing, module, stats)
            callback.on_minibatch_end(nothing, module, stats)
            callback.on_ppo_epoch_end(nothing, module, EpochStats(**epoch(0.3, 0.4, 0.6)))
    callback.on_update_end(nothing, module, UpdateStats(**update(0.3, 0.4, 0.6) if trained else update(NAN, NAN, NAN)))


def epoch(kl_old: float, kl_ref: float, clip_fraction: float) -> dict[str, Any]:
    known = dict.fromkeys((f.name for f in fields(EpochStats)), 0.0)
    return known | {"kl_old": kl_old, "kl_ref": kl_ref, "clip_fraction": clip_fraction, "ratio_max": 1.0}


def update(kl_old: float, kl_ref: float, clip_fraction: float) -> dict[str, Any]:
    known: dict[str, Any] = dict.fromkeys((f.name for f in fields(UpdateStats)), NAN)
    steps = 0 if math.isnan(kl_old) else 1
    known |= {"iteration": 1, "epochs_used": steps, "steps": steps, "steps_skipped": 0}
    return known | {"kl_old": kl_old, "kl_ref": kl_ref, "clip_fraction": clip_fraction}


@pytest.mark.parametrize("callback", controllers(), ids=lambda callback: type(callback).__name__)
def test_state_knobs_and_decisions_stay_as_they_are(callback: Any) -> None:
    control = Control()
    module = module_of(control)
    for knob in ("kl_coefficient", "lr_scale", "max_new_tokens"):
        control.own(knob, type(callback).__name__)
    usual = experience_stats(score_mean=0.5, kl_ref=0.4, advantage_raw_abs_mean=0.2, truncated_fraction=0.0)
    for _ in range(2):
        iterate(callback, module, usual, trained=True)
    before, knobs, stopped = copy.deepcopy(callback.state_dict()), knob_values(control), control.training_stopped
    nothing = replace(usual, kl_ref=NAN, advantage_abs_mean=NAN, advantage_raw_abs_mean=NAN)
    iterate(callback, module, nothing, trained=False)
    after = callback.state_dict()
    before.pop("history", None), after.pop("history", None)  # of AdaptiveKL: a gap in its picture
    assert after == before and knob_values(control) == knobs and control.training_stopped == stopped
    assert not control.decisions


def knob_values(control: Control) -> dict[str, float]:
    return {name: knob.value for name, knob in control.knobs.items()}


@pytest.mark.parametrize("mode", ["pid", "doubling", "proportional"])
def test_the_coefficient_does_not_fall_from_one_half(mode: Any) -> None:
    """If a missing KL were read as 0, pid without smoothing would take it from 0.5 to 0.001."""
    controller = AdaptiveKL(0.1, mode=mode, smoothing=0.0, minimum=0.001)
    beta = controller.next_coefficient(0.5, 0.1, 64)
    state = controller.state_dict()
    assert controller.next_coefficient(beta, NAN, 64) == beta == 0.5
    assert controller.state_dict() == state
    assert controller.next_coefficient(beta, 0.0, 64) < beta, "a KL that was measured as 0 is one"


def test_the_guards_multiplier_does_not_shrink() -> None:
    control, guard = Control(), KLGuard(target=0.1)
    module = module_of(control)
    far = experience_stats(kl_ref=0.2)
    for _ in range(2):
        iterate(guard, module, far, trained=False)
    assert guard.multiplier == 4.0
    iterate(guard, module, replace(far, kl_ref=NAN), trained=False)
    assert guard.multiplier == 4.0
    iterate(guard, module, replace(far, kl_ref=0.0), trained=False)
    assert guard.multiplier == 2.0, "a KL that was measured as 0 is calm"


@pytest.mark.parametrize("first", [0.1, NAN], ids=["measured", "nothing measured"])
def test_the_guard_sees_a_jump_from_the_first_minibatch_that_measured_anything(first: float) -> None:
    control, guard = Control(), KLGuard(restore=False, jump=1.0)
    module: Any = module_of(control)
    control.begin_iteration(1)
    guard.on_experience_ready(cast(Any, None), module, cast(Any, None), experience_stats(kl_ref=0.2))
    skipped = []
    with control.allow("skip_step"):
        for kl in (first, 0.1, NAN, 1.0, 1.2):
            stats = replace(minibatch_stats(), kl_old=kl, stepped=True)
            guard.on_before_step(cast(Any, None), module, stats)
            skipped.append(control.take("skip_step") is not None)
            guard.on_minibatch_end(cast(Any, None), module, stats)
    assert skipped == [False, False, False, False, True]
