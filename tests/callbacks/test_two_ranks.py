"""Two processes: a condition on one rank is one decision of both, and no rank hangs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.callbacks.two_ranks import scenarios
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every scenario of ``two_ranks.py`` as each rank saw it."""
    return run_ranks(scenarios, folder=tmp_path_factory.mktemp("ranks"))


EXPECTED = {
    "KL 0.02 and 0.5": {"skip_step", "stop_epochs"},
    "KL 0.02 and 0.1": set(),
    "clip 0.1 and 0.95": {"skip_step", "stop_epochs"},
    "KLEarlyStop": {"stop_epochs", "rollback", "stop_training"},
    "KLGuard": {"skip_step", "rollback", "stop_epochs", "raise_kl_coefficient"},
    "KLGuard, found in the run": {"skip_step", "rollback", "stop_epochs"},
    "AdaptiveKL": set(),
    "AdvantageVanish, weak on rank 0": set(),
    "AdvantageVanish, weak together": {"stop_epochs"},
    "GradientMonitor, rank 0": {"stop_epochs", "stop_training"},
    "GradientMonitor, rank 1": {"stop_epochs", "stop_training"},
    "OOMGuard": {"oom_retry"},
    "OOMGuard, memory nearly full": {"shorten_responses"},
    "LRBackoff": {"stop_epochs", "lower_learning_rate"},
    "LengthCurriculum": {"lengthen_responses"},
    "PromptMonitor": {"suspect_prompts"},
    "EfficiencyStop": {"stop_training"},
}
"""The verbs that each scenario must cause."""


@pytest.mark.parametrize("name", EXPECTED)
def test_one_condition_is_one_decision(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    for key in ("decided", "control", "knobs", "stopped"):
        assert first[key] == second[key]
    assert {verb for _, _, verb in first["decided"]} == EXPECTED[name]
    assert first["gradients"] == second["gradients"] == 0, "nothing half-accumulated is left"


def test_both_stop_at_the_same_minibatch_and_take_as_many_steps(ranks: list[dict[str, Any]]) -> None:
    """Means over the ranks: 0.26 is over the limit 0.1 at the first minibatch, 0.06 never; clip fraction 0.525."""
    for name, steps in (("KL 0.02 and 0.5", 0), ("KL 0.02 and 0.1", 4), ("clip 0.1 and 0.95", 0)):
        assert [rank[name]["control"]["update"] for rank in ranks] == [steps, steps]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_gradient_that_is_broken_on_one_rank_moves_nothing_on_the_other(
    ranks: list[dict[str, Any]], broken: int
) -> None:
    for rank in ranks:
        seen = rank[f"GradientMonitor, rank {broken}"]
        assert not seen["moved"] and seen["control"]["counts"]["nonfinite_steps"] == 5


def test_the_coefficient_and_the_budget_moved(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["AdaptiveKL"]["knobs"]["kl_coefficient"] != 0.1
    assert ranks[0]["OOMGuard"]["knobs"]["micro_batch_tokens"] < 8192
    assert ranks[0]["OOMGuard, memory nearly full"]["knobs"]["max_new_tokens"] == 3  # 6, 4.5, 3.4
