"""Callbacks together, with any policy and in any order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import GradientMonitor, KLEarlyStop, SamplesTable
from lightning_rlhf.events import EpochStats
from tests.support import Recorder, fit, minibatch_stats, tiny_module, tiny_policy


def test_callbacks_work_together_and_with_any_policy(tmp_path: Path) -> None:
    for policy in (tiny_policy(critic="none", reference="none"), tiny_policy(critic="shared")):
        blocks: dict[str, Any] = {} if policy.critic else {"advantage": {"estimator": "rloo"}}
        module = tiny_module(policy=policy, iterations=2, **blocks)
        monitor, recorder, folder = GradientMonitor(), Recorder(), tmp_path / f"critic_{policy.critic is not None}"
        brake = KLEarlyStop(1e-9, hard_limit=5.0, per_minibatch=True)
        fit(module, [monitor, brake, SamplesTable(every_n_iterations=1), recorder], folder=folder)
        assert module.control.iteration == 2
        assert monitor.steps == len(recorder.of("on_minibatch_end")) and monitor.norms["actor"] > 0
        assert set(monitor.norms) == ({"actor", "critic"} if policy.critic else {"actor"})
        assert [stats.steps_skipped for stats in recorder.of("on_update_end")] == [1, 1], "the second is over the limit"
        assert len(list((folder / "samples").iterdir())) == 2


def test_epoch_stats_are_weighted_by_tokens() -> None:
    pair = [
        replace(minibatch_stats(), tokens=1.0, kl_old=0.4, ratio_max=1.1),
        replace(minibatch_stats(), tokens=3.0, kl_old=0.0, ratio_max=1.5),
    ]
    result = EpochStats.over(pair)
    assert result.kl_old == pytest.approx(0.1) and result.ratio_max == 1.5


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_minibatch_that_measured_nothing_hides_no_other_from_the_brakes(broken: int) -> None:
    """A mean with NaN is NaN, and a maximum may be, depending on the order: neither would exceed a limit."""
    three = [replace(minibatch_stats(), tokens=2.0, kl_old=0.3, kl_ref=0.5, clip_fraction=0.6, ratio_max=4.0)] * 3
    nothing = dict.fromkeys(("kl_old", "kl_ref", "clip_fraction", "ratio_max", "entropy"), math.nan)
    three[broken] = replace(three[broken], finite=False, **nothing)
    result = EpochStats.over(three)
    assert result.minibatches == 3 and result.ratio_max == 4.0
    numbers = (result.kl_old, result.kl_ref, result.clip_fraction)
    assert numbers == pytest.approx((0.3, 0.5, 0.6), rel=1e-12)
    infinite = EpochStats.over([three[broken], replace(three[broken - 1], kl_old=math.inf)])
    assert infinite.kl_old == math.inf, "measured, and over every limit"
    none = EpochStats.over([three[broken]])
    assert all(math.isnan(value) for value in (none.kl_old, none.kl_ref, none.clip_fraction, none.ratio_max))
