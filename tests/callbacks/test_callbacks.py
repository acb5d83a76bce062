"""Callbacks together: any policy, any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import GradientMonitor, KLEarlyStop, SamplesTable
from lightning_rlhf.events import EpochStats
from tests.support import fit, minibatch_stats, tiny_module, tiny_policy


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
