"""Exact limits: a number at the limit is allowed, the next larger one is not. All numbers are exact in binary."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import (
    AdvantageVanish,
    Calibrate,
    CalibrationError,
    ClipFractionBreak,
    EfficiencyStop,
    KLEarlyStop,
    KLGuard,
    LengthCurriculum,
)
from lightning_rlhf.callbacks.advantage_vanish import MEMORY
from lightning_rlhf.control import Control
from lightning_rlhf.events import EpochStats
from lightning_rlhf.settings import SettingError
from tests.support import experience_stats, minibatch_stats, update_stats

NONE: Any = None


def module() -> Any:
    control = Control()
    control.register("kl_coefficient", 0.5)
    control.register("max_new_tokens", 8, minimum=1, integer=True)
    control.begin_iteration(1)
    return SimpleNamespace(control=control, reference=object())


def over(x: float) -> float:
    return math.nextafter(x, math.inf)


def epoch(**numbers: float) -> EpochStats:
    return replace(EpochStats.over([minibatch_stats()]), **numbers)


def ends_epochs(callback: Any, **numbers: float) -> bool:
    """Whether a second epoch with these numbers becomes the last one."""
    given = module()
    with given.control.allow("skip_step", "rollback"):
        callback.on_ppo_epoch_end(NONE, given, epoch(epoch=1, **numbers))
    return given.control.wants("stop_epochs")


def skips(callback: Any, **numbers: Any) -> bool:
    """Whether the step of a second minibatch with these numbers is not taken."""
    given = module()
    with given.control.allow("skip_step", "rollback"):
        callback.on_before_step(NONE, given, replace(minibatch_stats(), **{"minibatch": 1} | numbers))
    stopped = given.control.wants("stop_epochs")
    assert stopped == given.control.wants("skip_step"), "a step that is not taken is the batch's last"
    return stopped


def test_clip_fraction_break() -> None:
    callback = ClipFractionBreak(0.5, per_minibatch=True)
    for check in (ends_epochs, skips):
        assert not check(callback, clip_fraction=0.5) and check(callback, clip_fraction=over(0.5))
    assert not skips(ClipFractionBreak(0.5), clip_fraction=1.0), "only where every minibatch is judged"


@pytest.mark.parametrize("number", ["kl_old", "kl_ref"])
def test_kl_early_stop(number: str) -> None:
    limit = {"kl_old": 0.5, "kl_ref": 2.0}[number]
    callback = KLEarlyStop(0.5, hard_limit=2.0, per_minibatch=True)
    for check in (ends_epochs, skips):
        assert not check(callback, **{number: limit}) and check(callback, **{number: over(limit)})
    assert not skips(KLEarlyStop(0.5, hard_limit=2.0), **{number: 9.0})


def test_kl_early_stop_does_not_skip_the_first_step_over_the_hard_limit() -> None:
    """There is nothing to undo yet."""
    callback = KLEarlyStop(0.5, hard_limit=2.0, per_minibatch=True)
    assert not skips(callback, kl_ref=3.0, epoch=0, minibatch=0) and skips(callback, kl_ref=3.0, epoch=1, minibatch=0)


def test_kl_early_stop_counts_iterations_over_one_and_a_half_targets() -> None:
    callback, given = KLEarlyStop(0.5, patience=2), module()
    for kl, count in ((0.75, 0), (over(0.75), 1), (0.75, 0), (1.0, 1), (1.0, 2)):
        assert given.control.training_stopped is None
        callback.on_update_end(NONE, given, update_stats(kl_old=kl))
        assert callback.over_target == count
    assert given.control.training_stopped == "kl/old over 1.5 x 0.5 in 2 iterations in a row (last 1.0000)"


def test_kl_guard_with_a_target() -> None:
    """Target 0.5: soft over 0.75, hard over 1.5; the multiplier grows by 2 up to 4 and shrinks to 1."""
    callback = KLGuard(target=0.5, soft=1.5, hard=3.0, factor=2.0, max_multiplier=4.0)
    multipliers, ended = [], []
    for kl in (0.75, over(0.75), 1.5, over(1.5), over(1.5), 0.25, 0.25, 0.25):
        given = module()
        with given.control.allow("skip_step", "rollback"):
            callback.on_experience_ready(NONE, given, NONE, experience_stats(kl_ref=kl))
        ended.append((given.control.wants("stop_epochs"), given.control.take_rollback()))
        callback.on_update_end(NONE, given, update_stats())
        multipliers.append(callback.multiplier)
    assert multipliers == [1.0, 2.0, 4.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    hard = (True, "actor")
    assert ended == [(False, None)] * 3 + [hard, hard] + [(False, None)] * 3


@pytest.mark.parametrize("rise", [0.0, 0.5, over(0.5)])
def test_efficiency_stop(rise: float) -> None:
    """A rise of the score and a drift of the KL of at most 0.5 count as none."""
    for scores, kls in (((0.0, rise), (1.0, 1.0)), ((0.0, 0.0), (0.0, rise)), ((0.0, 0.0), (rise, 0.0))):
        callback, given = EfficiencyStop(window=1, min_improvement=0.5, kl_tolerance=0.5, relative=False), module()
        for score, kl in zip(scores, kls, strict=True):
            assert given.control.training_stopped is None
            callback.on_experience_ready(NONE, given, NONE, experience_stats(score_mean=score, kl_ref=kl))
        assert (given.control.training_stopped is not None) == (rise <= 0.5)


def test_efficiency_stop_forgets_what_lies_before_two_windows() -> None:
    callback, given = EfficiencyStop(window=2, relative=False), module()
    for score in (1.0, 2.0, 3.0, 4.0, 5.0):
        callback.on_experience_ready(NONE, given, NONE, experience_stats(score_mean=score, kl_ref=score / 2))
    assert callback.scores == [2.0, 3.0, 4.0, 5.0] and callback.kls == [1.0, 1.5, 2.0, 2.5]
    assert callback.start == 1.5


def test_advantage_vanish_trains_on_a_mean_at_the_threshold_and_remembers_fifty() -> None:
    absolute, given = AdvantageVanish(0.5, relative=False), module()
    for size, left_out in ((0.5, False), (math.nextafter(0.5, 0.0), True), (0.0, True)):
        absolute.on_experience_ready(NONE, given, NONE, experience_stats(advantage_raw_abs_mean=size))
        assert (given.control.take("stop_epochs") is not None) == left_out
    relative = AdvantageVanish(0.5)
    for size in range(1, MEMORY + 12):
        relative.on_experience_ready(NONE, given, NONE, experience_stats(advantage_raw_abs_mean=100.0 + size))
    assert MEMORY == 50 and relative.sizes == [100.0 + size for size in range(12, MEMORY + 12)]
    assert relative.state_dict() == {"sizes": relative.sizes}
    middle = 100.0 + (12 + MEMORY + 11) / 2  # the median of 50 numbers in a row
    for size, left_out in ((math.nextafter(middle / 2, 0.0), True), (middle / 2, False)):
        relative.on_experience_ready(NONE, given, NONE, experience_stats(advantage_raw_abs_mean=size))
        assert (given.control.take("stop_epochs") is not None) == left_out


@pytest.mark.parametrize(
    ("engine", "limit"),
    [
        ({}, 1e-3),
        ({"dtype": "float32"}, 1e-3),
        ({"dtype": "bfloat16"}, 0.1),
        ({"dtype": "float32", "weight_bits": 8}, 0.5),
        ({"quantization": "fp8"}, 0.5),
    ],
)
def test_calibrate_refuses_what_the_precision_does_not_explain(engine: dict[str, Any], limit: float) -> None:
    given = module()
    given.engine = SimpleNamespace(sampling=SimpleNamespace(truncated=False, temperature=1.0), describe=lambda: engine)
    given.actor, given.trainer = torch.nn.Linear(1, 1), SimpleNamespace(precision="32-true")
    mask = torch.tensor([[True, True, False]])
    rollout = SimpleNamespace(rollout_logprobs=torch.tensor([[-1.0, -2.0, math.nan]]), response_mask=mask)
    asked: list[Any] = []

    def probe(prompts: Any, *, max_new_tokens: int) -> Any:
        asked.append((prompts, max_new_tokens))
        return rollout, rollout.rollout_logprobs + gap

    given.probe = probe
    for gap in (0.99 * limit, -0.99 * limit):
        Calibrate().on_rollout_start(NONE, given, SimpleNamespace(first=lambda count: count))  # type: ignore[arg-type]
        assert given.control.reported["calibrate/logprob_abs_diff_mean"] == pytest.approx(abs(gap), rel=1e-3)
    gap = 1.01 * limit
    with pytest.raises(CalibrationError, match=rf"over the limit of {limit:g} "):
        Calibrate().on_rollout_start(NONE, given, SimpleNamespace(first=lambda count: count))  # type: ignore[arg-type]
    assert asked == [(16, 32)] * 3, "16 prompts, answers of 32 tokens"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(KLEarlyStop, {"hard_limit": bad}) for bad in (0.0, -1.0, math.nan)],
        *[(KLEarlyStop, {"patience": bad}) for bad in (0, 1.5)],
        *[(LengthCurriculum, {"start": bad}) for bad in (0.0, -0.5, 0, 1.5)],
        *[(LengthCurriculum, {"max_truncated": bad}) for bad in (0.0, 1.0, -0.5)],
        *[(LengthCurriculum, {"iterations": bad}) for bad in (0, 1.5)],
    ],
)
def test_settings_out_of_bounds_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(SettingError, match=rf"{name} = .* is not allowed: a (finite|whole) number"):
        kind(**settings)


def test_the_smallest_settings_are_accepted() -> None:
    assert KLEarlyStop(hard_limit=None, patience=1).patience == 1
    curriculum = LengthCurriculum(start=1, iterations=1, max_truncated=None)
    assert (curriculum.start, curriculum.least) == (1, 0)


def test_length_curriculum_grows_by_half_where_more_is_cut() -> None:
    callback, given = LengthCurriculum(start=3, iterations=4, max_truncated=0.25), module()
    given.engine = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=11))
    given.control.register("max_new_tokens", 11, minimum=1, integer=True)
    callback.setup(NONE, given, "fit")
    lengths = []
    for iteration, cut in enumerate((0.25, 0.25, over(0.25), 0.9, 0.0, 0.9), start=1):
        given.control.begin_iteration(iteration)
        callback.on_rollout_start(NONE, given, NONE)
        lengths.append(given.control.value("max_new_tokens"))
        callback.on_experience_ready(NONE, given, NONE, experience_stats(truncated_fraction=cut))
    assert lengths == [3, 5, 7, 11, 11, 11], "3 + 8 x (iteration - 1) / 4, but 1.5 x 7 after the third"
