"""Limits of rollout correction that follow the data: two processes steer them as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_rlhf.control import Control
from lightning_rlhf.functional.correction import correct
from lightning_rlhf.metrics.correction import CorrectionMetrics
from lightning_rlhf.mixins.adaptive_limits import AdaptiveLimits
from lightning_rlhf.mixins.correction_settings import AdaptiveSettings, RolloutCorrectionSettings
from tests.ranks import run_ranks

SETTINGS = RolloutCorrectionSettings(
    rollout_is="token",
    rollout_is_threshold=2.0,
    rollout_rs="token",
    rollout_rs_threshold=1.5,
    adaptive=AdaptiveSettings(target_ess=0.97, target_rejection=0.05, step=0.3, smoothing=0.5),
)


def steer(rows: slice) -> list[tuple[float, float]]:
    """Cap and width of the bands after each of five iterations, of which this process sees some rows."""
    limits, path = AdaptiveLimits(Control(), SETTINGS), []
    for iteration in range(5):
        generator = torch.Generator().manual_seed(iteration)
        rollout = -2.5 * torch.rand(12, 9, generator=generator)
        train = rollout + 0.4 * torch.randn(12, 9, generator=generator)
        mask = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=generator)
        metrics = CorrectionMetrics(full=False)
        plan = SETTINGS.plan.adjusted(limits.cap, limits.scale)
        metrics.update(correct(train[rows], rollout[rows], mask[rows], plan), train[rows], rollout[rows])
        numbers = metrics.compute()
        limits.observe(numbers["rollout_corr/is_used_ess"], numbers["rollout_corr/rollout_rs_masked_fraction"])
        path.append((limits.cap, limits.scale))
    return path


def share_of(rank: int) -> list[tuple[float, float]]:
    return steer(slice(0, 9) if rank == 0 else slice(9, 12))


def test_two_processes_steer_the_limits_as_one(tmp_path: Path) -> None:
    first, second = run_ranks(share_of, folder=tmp_path)
    whole = steer(slice(None))
    assert len(set(whole)) == 5, "both limits move"
    assert first == second
    for found, expected in zip(first, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
