"""Rejection rules: what the names and bounds mean, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_rlhf.errors import SettingError
from lightning_rlhf.functional.correction import Plan, correct
from lightning_rlhf.functional.rejection import RULES, Rule, parse_rules

K2, K3 = 0.5 * math.log(2) ** 2, 2 - 1 - math.log(2)
"""Divergences of a token of ratio 2: 0.2402 and 0.3069 nats."""


def kept(rule: str, bound: Any, ratios: list[float], lower: float | None = None) -> list[bool]:
    gap = torch.tensor([ratios], dtype=torch.float64).log()
    plan = Plan(rules=parse_rules(rule, bound, lower))
    return correct(gap, torch.zeros_like(gap), torch.ones_like(gap).bool(), plan).keep[0].tolist()


@pytest.mark.parametrize(
    ("rule", "accepting", "rejecting"),
    [
        ("token_k2", K2 + 1e-9, K2 - 1e-9),
        ("token_k3", K3 + 1e-9, K3 - 1e-9),
        ("seq_sum_k2", 2 * K2 + 1e-9, 2 * K2 - 1e-9),
        ("seq_sum_k3", 2 * K3 + 1e-9, 2 * K3 - 1e-9),
        ("seq_mean_k2", 2 / 3 * K2 + 1e-9, 2 / 3 * K2 - 1e-9),
        ("seq_mean_k3", 2 / 3 * K3 + 1e-9, 2 / 3 * K3 - 1e-9),
        ("seq_max_k2", K2 + 1e-9, K2 - 1e-9),
        ("seq_max_k3", K3 + 1e-9, K3 - 1e-9),
        ("token", 2.0 + 1e-9, 2.0 - 1e-9),
        ("token_k1", 2.0 + 1e-9, 2.0 - 1e-9),
        ("sequence", 4.0 + 1e-9, 4.0 - 1e-9),
        ("seq_sum_k1", 4.0 + 1e-9, 4.0 - 1e-9),
        ("geometric", 4.0 ** (1 / 3) + 1e-9, 4.0 ** (1 / 3) - 1e-9),
        ("seq_mean_k1", 4.0 ** (1 / 3) + 1e-9, 4.0 ** (1 / 3) - 1e-9),
    ],
)
def test_bound_of_each_rule(rule: str, accepting: float, rejecting: float) -> None:
    """Ratios 2, 2, 1: tokens of ratio 2, product 4, geometric mean 4^(1/3)."""
    whole = RULES[rule][0] != "token"
    assert kept(rule, accepting, [2, 2, 1]) == [True, True, True]
    assert kept(rule, rejecting, [2, 2, 1]) == ([False] * 3 if whole else [False, False, True])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_row_of_one_token_is_its_own_sum_mean_and_maximum(rule: str) -> None:
    bound = {"k2": K2, "k3": K3}.get(RULES[rule][1], 2.0)
    assert kept(rule, bound + 1e-9, [2]) == [True] and kept(rule, bound - 1e-9, [2]) == [False]


def test_all_rules_are_in_the_table_above() -> None:
    [mark] = test_bound_of_each_rule.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(RULES)


@pytest.mark.parametrize("rule", ["token", "token_k1"])
def test_bounds_of_a_ratio_are_on_trainer_over_engine(rule: str) -> None:
    """Lower 0.5, upper 3: ratio 0.4 is too small, 2.9 is not too large. (A reference tests the inverse ratio.)"""
    assert kept(rule, "0.5_3.0", [0.4, 0.6, 2.9, 3.1]) == [False, True, True, False]
    assert kept(rule, 3.0, [0.4, 0.6, 2.9, 3.1], lower=0.5) == [False, True, True, False]


@pytest.mark.parametrize("names", ["token_k1,seq_max_k3", ["token_k1", "seq_max_k3"], " token_k1 , seq_max_k3 "])
@pytest.mark.parametrize("bounds", ["0.5_3.0,0.7", ["0.5_3.0", 0.7], ["0.5_3.0", "0.7"]])
def test_lists_and_commas(names: Any, bounds: Any) -> None:
    assert parse_rules(names, bounds) == (Rule("token_k1", 3.0, 0.5), Rule("seq_max_k3", 0.7))


def test_one_bound_is_shared_and_the_default_lower_bound_is_the_reciprocal() -> None:
    assert parse_rules("token,geometric", 4) == (Rule("token", 4.0, 0.25), Rule("geometric", 4.0, 0.25))
    assert parse_rules(None, 2.0) == parse_rules("", None) == parse_rules([], None) == ()


def test_a_scaled_band_is_wider_in_log_space() -> None:
    assert Rule("token", 2.0, 0.5).scaled(3.0) == Rule("token", 8.0, 0.125)
    assert Rule("seq_max_k3", 0.5).scaled(3.0) == Rule("seq_max_k3", 1.5)


def test_which_rules_reject_whole_rows() -> None:
    rows = {name for name in RULES if Rule(name, 2.0).per_row}
    assert rows == set(RULES) - {"token", "token_k1", "token_k2", "token_k3"}


def test_log_ratios_beyond_the_clamp_count_as_the_clamp() -> None:
    """A bound of e^20 or more lets every ratio pass, and a divergence is that of a log-ratio of 20."""
    far = math.exp(20.0) * (1 + 1e-9)
    gap = torch.tensor([[100.0, -100.0, 0.0]], dtype=torch.float64)
    for rule, bound in (("token", far), ("sequence", far), ("geometric", far), ("seq_max_k2", 200.0)):
        for row in (gap, -gap, gap.abs(), -gap.abs()):
            plan = Plan(rules=parse_rules(rule, bound))
            found = correct(row, torch.zeros_like(row), torch.ones_like(row).bool(), plan)
            assert found.keep.all(), (rule, row)
    over = Plan(rules=parse_rules("seq_max_k2", 200.0 - 1e-9))
    assert not correct(gap, torch.zeros_like(gap), torch.ones_like(gap).bool(), over).keep.any()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_without_columns_are_accepted(rule: str) -> None:
    none = torch.zeros(3, 0)
    found = correct(none, none, none.bool(), Plan(rules=parse_rules(rule, 2.0)))
    assert found.keep.shape == (3, 0)
    assert found.passed[0].shape == ((3, 0) if rule.startswith("token") else (3, 1))


@pytest.mark.parametrize(
    ("names", "threshold", "lower", "part", "said"),
    [
        ("tokens", 2.0, None, "rollout_rs", "did you mean 'token'"),
        ("token_k4", 2.0, None, "rollout_rs", "token_k3"),
        ("seq_max_k1", 2.0, None, "rollout_rs", "seq_max_k2"),
        ("token", None, None, "rollout_rs_threshold", "needs one"),
        ("token", 0, None, "rollout_rs_threshold", "> 0"),
        ("token", -2, None, "rollout_rs_threshold", "> 0"),
        ("token", "nan", None, "rollout_rs_threshold", "> 0"),
        ("token", True, None, "rollout_rs_threshold", "> 0"),
        ("token", "two", None, "rollout_rs_threshold", "> 0"),
        ("token", "0_2", None, "rollout_rs_threshold", "> 0"),
        ("token", "3.0_2.0", None, "rollout_rs_threshold", "at most 2"),
        ("token", 2.0, 3.0, "rollout_rs_threshold_lower", "at most 2"),
        ("token", 2.0, 0.0, "rollout_rs_threshold_lower", "> 0"),
        ("token_k1", 0.5, None, "rollout_rs_threshold", "where nothing lies"),
        ("token_k2", "0.1_0.5", None, "rollout_rs_threshold", "upper bound alone"),
        ("seq_max_k3", 0.5, 0.1, "rollout_rs_threshold_lower", "upper bound alone"),
        ("token,geometric", "2.0,1.1,3.0", None, "rollout_rs_threshold", "one for each"),
    ],
)
def test_invalid_rules_are_refused(names: Any, threshold: Any, lower: Any, part: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        parse_rules(names, threshold, lower)
    assert caught.value.key == part
    error = caught.value
    assert str(error) == f"{part} = {error.value!r} is not allowed: {error.allowed}"
