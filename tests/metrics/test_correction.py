"""Metrics of rollout correction: exact percentiles, nothing made up, the same on two processes as on one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlhf.functional.correction import Plan, WeightLevel, correct
from lightning_rlhf.functional.rejection import parse_rules
from lightning_rlhf.metrics.correction import PERCENTILES, TAIL_BINS, CorrectionMetrics
from lightning_rlhf.metrics.correction_numbers import quantiles
from lightning_rlhf.metrics.names import METRICS, check, find
from tests.ranks import run_ranks

PLAN = Plan(
    level="token",
    cap=1.5,
    normalise=True,
    rules=parse_rules("token,seq_max_k3,seq_mean_k1", "2.0,1.0,1.2"),
    veto=1e-2,
)


def batch(rows: int = 12, columns: int = 9, scale: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rollout = -2.5 * torch.rand(rows, columns, generator=generator)
    train = rollout + scale * torch.randn(rows, columns, generator=generator)
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    return train, rollout, torch.arange(columns) < lengths


def measured(plan: Plan = PLAN, *, full: bool, rows: slice = slice(None)) -> tuple[dict[str, float], list]:
    train, rollout, mask = (x[rows] for x in batch())
    metrics = CorrectionMetrics(full=full)
    metrics.update(correct(train, rollout, mask, plan), train, rollout)
    return metrics.compute(), metrics.tail_envelope


# --- distributed -----------------------------------------------------------------------------------------------------

SHARES = {
    "even": [slice(0, 6), slice(6, 12)],
    "uneven": [slice(0, 11), slice(11, 12)],
    "empty": [slice(0, 12), slice(0, 0)],
}


def of_one_rank(rank: int, share: str) -> dict[str, Any]:
    train, rollout, mask = (x[SHARES[share][rank]] for x in batch())
    if share == "empty" and rank == 1:
        train, rollout, mask = (x[:3] for x in batch())
        mask = torch.zeros_like(mask)  # a rank without a valid token takes part
    found = correct(train, rollout, mask, PLAN)
    results: dict[str, Any] = {"weights": found.weights, "keep": found.keep}
    for full in (False, True):
        metrics = CorrectionMetrics(full=full)
        metrics.update(found, train, rollout)
        results["full" if full else "cheap"] = metrics.compute()
        results["envelope"] = metrics.tail_envelope
    return results


def every_share(rank: int) -> dict[str, dict[str, Any]]:
    return {share: of_one_rank(rank, share) for share in SHARES}


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(every_share, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("share", SHARES)
def test_two_processes_equal_one(both_ranks: list[dict[str, dict[str, Any]]], share: str) -> None:
    ranks = [rank[share] for rank in both_ranks]
    train, rollout, mask = batch()
    whole = correct(train, rollout, mask, PLAN)
    parts = [ranks[0]] if share == "empty" else ranks
    for name, expected in (("weights", whole.weights), ("keep", whole.keep)):
        torch.testing.assert_close(torch.cat([rank[name] for rank in parts]), expected, rtol=1e-6, atol=1e-6)
    for tier in ("cheap", "full"):
        expected_numbers, _ = measured(full=tier == "full")
        for rank in ranks:
            assert rank[tier].keys() == expected_numbers.keys()
            for name, value in expected_numbers.items():
                assert rank[tier][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert ranks[0]["envelope"] == ranks[1]["envelope"]


# --- percentiles -----------------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_numpy() -> None:
    train, rollout, mask = batch()
    numbers, envelope = measured(full=True)
    weights = (train - rollout)[mask].double().exp().numpy()
    for percent in PERCENTILES:
        expected = np.percentile(weights, percent)
        assert numbers[f"rollout_corr/rollout_is_p{percent}"] == pytest.approx(expected, rel=1e-5)
    probability, gap = rollout[mask].exp().numpy(), (train - rollout)[mask].numpy()
    assert sum(row["tokens"] for row in envelope) == mask.sum() and len(envelope) == TAIL_BINS
    for row in envelope:
        inside = gap[(probability >= row["low"] - 1e-9) & (probability < row["high"] - 1e-9)]
        assert len(inside) == row["tokens"]
        if len(inside):
            assert row["p2"] == pytest.approx(np.percentile(inside, 2), rel=1e-5)
            assert row["p98"] == pytest.approx(np.percentile(inside, 98), rel=1e-5)
            assert numbers[f"rollout_corr/tail_p98_prob_{row['low']:.1f}"] == row["p98"]


@pytest.mark.parametrize("count", [0, 1, 2, 101])
def test_quantiles_interpolate(count: int) -> None:
    values = torch.arange(count, dtype=torch.float64).flip(0) / 7
    found = quantiles(values, (0, 2, 50, 98, 100)).tolist()
    if not count:
        assert all(math.isnan(value) for value in found)
    else:
        assert found == pytest.approx(np.percentile(values.numpy(), [0, 2, 50, 98, 100]).tolist())


# --- tiers -----------------------------------------------------------------------------------------------------------


def test_the_full_set_contains_the_cheap_one() -> None:
    cheap, full = measured(full=False)[0], measured(full=True)[0]
    assert {name: full[name] for name in cheap} == pytest.approx(cheap)
    assert len(full) > 2 * len(cheap)
    check(full)


def test_several_micro_batches_are_one_batch() -> None:
    train, rollout, mask = batch()
    plan = Plan(level="sequence", rules=PLAN.rules, veto=PLAN.veto)
    metrics = CorrectionMetrics(full=True)
    for rows in (slice(0, 5), slice(5, 12)):
        metrics.update(correct(train[rows], rollout[rows], mask[rows], plan), train[rows], rollout[rows])
    whole, _ = measured(plan, full=True)
    assert metrics.compute() == pytest.approx(whole, rel=1e-6, abs=1e-6)


def test_batches_of_another_plan_do_not_mix() -> None:
    train, rollout, mask = batch()
    metrics = CorrectionMetrics()
    metrics.update(correct(train, rollout, mask, Plan()), train, rollout)
    with pytest.raises(ValueError, match="same kind of plan"):
        metrics.update(correct(train, rollout, mask, PLAN), train, rollout)
    with pytest.raises(RuntimeError, match="before any update"):
        CorrectionMetrics().compute()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(12, 9), (12, 0), (0, 9)])
def test_nothing_valid_is_nothing_measured(shape: tuple[int, int], full: bool) -> None:
    """No metric at all: every one of them would be a 0 that nobody measured."""
    nothing = torch.full(shape, math.nan)
    metrics = CorrectionMetrics(full=full)
    metrics.update(correct(nothing, nothing, nothing.bool() & False, PLAN), nothing, nothing)
    assert metrics.compute() == {}


def test_missing_log_probabilities_alone_are_counted_and_nothing_else() -> None:
    train, mask = torch.full((2, 3), -1.0), torch.ones(2, 3).bool()
    rollout = torch.full_like(train, math.nan)
    metrics = CorrectionMetrics(full=True)
    metrics.update(correct(train, rollout, mask, Plan(rules=parse_rules("seq_sum_k3", 1.0))), train, rollout)
    assert metrics.compute() == {
        "rollout_corr/missing_fraction": 1.0,
        "rollout_corr/accepted_fraction": 1.0,
        "rollout_corr/rollout_rs_masked_fraction": 0.0,
        "rollout_corr/rollout_rs_seq_masked_fraction": 0.0,
    }


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("shape", [(16384, 1), (1, 16384), (128, 128)])
def test_equal_weights_have_no_deviation(level: WeightLevel, shape: tuple[int, int]) -> None:
    """16,384 weights of 1.0003: squared in float32 they had a deviation of 1.7e-4."""
    width = shape[1] if level == "sequence" else 1
    train = torch.full(shape, math.log(1.0003) / width)
    rollout, mask = torch.zeros_like(train), torch.ones(shape).bool()
    metrics = CorrectionMetrics(full=True)
    plan = Plan(level=level, rules=parse_rules("token", 2.0))
    metrics.update(correct(train, rollout, mask, plan), train, rollout)
    numbers = metrics.compute()
    for name in ("rollout_is_std", "rollout_is_seq_std", "rollout_rs_std", "rollout_rs_seq_std"):
        assert numbers[f"rollout_corr/{name}"] == pytest.approx(0.0, abs=1e-10), name
    for name in ("rollout_is_eff_sample_size", "is_used_ess"):
        assert numbers[f"rollout_corr/{name}"] == pytest.approx(1.0, abs=1e-12), name
    assert numbers["rollout_corr/rollout_is_seq_mean"] == pytest.approx(1.0003, abs=1e-5)


def test_small_deviations_are_those_of_float64() -> None:
    """Weights within 1e-5 of 1, where squares of float32 numbers know nothing of the spread."""
    generator = torch.Generator().manual_seed(0)
    train = 1e-5 * torch.randn(64, 32, generator=generator)
    rollout, mask = torch.zeros_like(train), torch.ones(64, 32).bool()
    correction = correct(train, rollout, mask, Plan(level="token"))
    assert correction.raw is not None
    metrics = CorrectionMetrics(full=True)
    metrics.update(correction, train, rollout)
    numbers, weights = metrics.compute(), correction.raw.double()
    expected = {
        "rollout_is_std": weights.std(correction=0),
        "rollout_is_seq_std": weights.mean(-1).std(),
        "rollout_is_eff_sample_size": weights.mean() ** 2 / weights.square().mean(),
        "is_used_ess": weights.mean() ** 2 / weights.square().mean(),
    }
    for name, value in expected.items():
        assert numbers[f"rollout_corr/{name}"] == pytest.approx(value.item(), rel=1e-6), name


def test_identical_probabilities_that_do_not_vary_have_no_correlation() -> None:
    same = torch.full((2, 3), -0.5)
    metrics = CorrectionMetrics()
    metrics.update(correct(same, same, torch.ones(2, 3).bool(), Plan()), same, same)
    numbers = metrics.compute()
    assert "rollout_corr/rollout_actor_probs_pearson_corr" not in numbers
    assert numbers["rollout_corr/k3_kl"] == numbers["rollout_corr/chi2_seq"] == 0.0, "KL of equal policies is 0"


def test_every_registered_metric_is_reported_by_some_plan() -> None:
    names = set()
    for plan in (PLAN, Plan(level="sequence", rules=parse_rules("token", 2.0))):
        names |= set(measured(plan, full=True)[0])
    reported = {metric.name for metric in (find(name) for name in names) if metric is not None}
    assert {metric.name for metric in METRICS if metric.name.startswith("rollout_corr/")} == reported
