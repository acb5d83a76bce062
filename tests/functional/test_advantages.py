"""Token rewards, GAE and the group estimators."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.advantages import (
    gae,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    token_rewards,
)
from lightning_rlhf.functional.stats import whiten

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo_losses.json").read_text())["cases"]
JUNK = [None, math.nan, math.inf, -math.inf]
"""What padding holds: as given, or one of these."""


def golden(name: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN if name in case["id"]]


def tensors(case: dict[str, Any], junk: float | None = None) -> dict[str, Tensor]:
    """The inputs of a golden case; masked slots hold ``junk``."""
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    result = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["inputs"].items()}
    if junk is not None:
        result = {name: torch.where(mask, x, junk) if x.ndim == 2 else x for name, x in result.items()}
    return {**result, "response_mask": mask}


def close(actual: Tensor, expected: Any, mask: Tensor) -> None:
    """Equal on valid tokens, 0 elsewhere."""
    torch.testing.assert_close(actual[mask], torch.tensor(expected, dtype=actual.dtype)[mask], rtol=1e-6, atol=1e-8)
    assert (actual[~mask] == 0).all()


# --- token rewards -----------------------------------------------------------------------------------------------


def test_the_score_lies_on_the_last_valid_token() -> None:
    """Also where the row is padded; that of a row without a valid token is lost."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([5.0, 7.0, 9.0]), mask)
    assert rewards.tolist() == [[0, 0, 5, 0, 0], [0, 0, 0, 0, 7], [0, 0, 0, 0, 0]]
    advantages, returns = gae(rewards, torch.zeros(3, 5), mask, gamma=1.0, lam=1.0)
    assert advantages[0].tolist() == returns[0].tolist() == [5, 5, 5, 0, 0]


def test_masked_tokens_carry_no_penalty() -> None:
    """The KL of the masked token must not reach the return of the first one (0.2 instead of 0.4)."""
    mask, kl = torch.tensor([[1, 0, 1]]), torch.tensor([[2.0, 4.0, 6.0]])
    rewards = token_rewards(torch.tensor([3.0]), mask, kl, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 0.0, 2.4]]))
    returns = rewards_to_go(rewards, mask, gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.4, 0.0, 2.4]]))


def test_a_coefficient_of_zero_is_no_penalty_even_on_infinite_kl() -> None:
    rewards = token_rewards(torch.tensor([1.0]), torch.ones(1, 2), torch.tensor([[math.inf, 0.0]]), 0.0)
    assert rewards.tolist() == [[0.0, 1.0]]


# --- GAE ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("case", golden("_gae_"))
def test_gae_matches_the_reference(case: dict[str, Any], junk: float | None) -> None:
    inputs, config = tensors(case, junk), case["config"]
    mask = inputs["response_mask"]
    advantages, returns = gae(inputs["token_level_rewards"], inputs["values"], mask, **config)
    whitened = whiten(advantages, mask)
    if "error" in case:
        # One valid token, reward 1, value 0.25: A = 0.75. The reference refuses to whiten it; we whiten it to 0.
        assert case["id"] == "ex_pl_003_gae_one_token"
        assert (advantages.item(), returns.item(), whitened.item()) == (0.75, 1.0, 0.0)
        return
    close(advantages, case["outputs"]["advantages_before_whitening"], mask)
    close(returns, case["outputs"]["returns"], mask)
    close(whitened, case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("junk", [7.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_on_padding_bootstrap_nothing(junk: float, dtype: torch.dtype) -> None:
    """[1.922, 1.58, 1.2] if they leak."""
    rewards = torch.tensor([[0.0, 0.0, 2.0, junk]], dtype=dtype)
    values = torch.tensor([[0.5, 1.0, 1.5, junk]], dtype=dtype)
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]), gamma=1.0, lam=0.9)
    torch.testing.assert_close(advantages, torch.tensor([[1.355, 0.95, 0.5, 0.0]], dtype=dtype))
    torch.testing.assert_close(returns, torch.tensor([[1.855, 1.95, 2.0, 0.0]], dtype=dtype))


@pytest.mark.parametrize(
    ("gamma", "lam", "truncated", "ended"),
    [(1.0, 1.0, [1.3, 1.3], [0.5, 0.5]), (0.9, 0.5, [0.499, 1.22], [0.175, 0.5])],
)
def test_truncated_rows_are_valued_by_the_state_after_them(
    gamma: float, lam: float, truncated: list[float], ended: list[float]
) -> None:
    """The bootstrap belongs to the last valid token, wherever the padding begins."""
    rewards, values = torch.tensor([[0.0, 1.0]]).repeat(2, 1), torch.full((2, 2), 0.5)
    expected = torch.tensor([truncated, ended])
    for padding in (0, 3):
        pad = (0, padding)
        mask = torch.nn.functional.pad(torch.ones(2, 2), pad)
        padded_rewards, padded_values = (torch.nn.functional.pad(x, pad, value=math.nan) for x in (rewards, values))
        bootstrap = torch.tensor([0.8, 0.0])
        advantages, _ = gae(padded_rewards, padded_values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
        torch.testing.assert_close(advantages[:, :2], expected)


@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 1), st.data())
@settings(max_examples=40, deadline=None)
def test_gae_is_the_recursion_over_valid_tokens(seed: int, gamma: float, lam: float, data: st.DataObject) -> None:
    """Against the definition, token by token, whatever the holes and whatever lies in them."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    clean = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        after, running = bootstrap[row], torch.zeros(())
        for t in reversed(range(columns)):
            if mask[row, t]:
                delta = clean[0, row, t] + gamma * after - clean[1, row, t]
                running = delta + gamma * lam * running
                expected[row, t], after = running, clean[1, row, t]
    junk = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
    rewards, values = torch.where(mask, clean, junk)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.where(mask, expected + clean[1], 0.0))


# --- estimators without a critic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("_grpo") + golden("_rloo"))
def test_group_estimators_match_the_reference(case: dict[str, Any]) -> None:
    inputs, mask = tensors(case), torch.tensor(case["inputs"]["response_mask"]).bool()
    scores, group = inputs["token_level_rewards"].sum(-1), inputs["index"].long()
    if "rloo" in case["id"]:
        advantages = rloo_advantages(scores, group, mask)
    else:
        normalise = case["config"]["norm_adv_by_std_in_grpo"]
        advantages = grpo_advantages(scores, group, mask, normalise_std=normalise)
    close(advantages, case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("case", golden("_reinforce_pp"))
def test_reinforce_plus_plus_matches_the_reference(case: dict[str, Any], junk: float | None) -> None:
    inputs = tensors(case, junk)
    mask = inputs["response_mask"]
    returns = reinforce_plus_plus_advantages(inputs["token_level_rewards"], mask, gamma=case["config"]["gamma"])
    close(returns, case["outputs"]["returns"], mask)
    close(whiten(returns, mask), case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("case", golden("_remax"))
def test_remax_matches_the_reference(case: dict[str, Any], junk: float | None) -> None:
    inputs = tensors(case, junk)
    mask = inputs["response_mask"]
    close(rewards_to_go(inputs["token_level_rewards"], mask, gamma=1.0), case["outputs"]["returns"], mask)
    advantages = remax_advantages(inputs["token_level_rewards"], inputs["reward_baselines"], mask)
    close(advantages, case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("estimate", [grpo_advantages, rloo_advantages])
def test_a_group_of_one_and_equal_scores_have_no_advantage(estimate: Any) -> None:
    mask = torch.ones(4, 2)
    advantages = estimate(torch.tensor([3.7, 0.35, 0.35, 0.35]), torch.tensor([8, 2, 2, 2]), mask)
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("junk", [5.0, math.nan, math.inf])
@pytest.mark.parametrize(("estimate", "expected"), [(grpo_advantages, 2**-0.5), (rloo_advantages, 2.0)])
def test_rejected_rows_do_not_count_in_their_group(estimate: Any, expected: float, junk: float) -> None:
    """Scores 1 and 3 stay: the rejected third neither moves the mean nor counts, and gets 0 itself."""
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    advantages = estimate(torch.tensor([1.0, junk, 3.0]), torch.tensor([0, 0, 0]), mask)
    torch.testing.assert_close(
        advantages, expected * torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 0.0]]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("estimate", [grpo_advantages, rloo_advantages])
def test_groups_need_not_lie_side_by_side(estimate: Any) -> None:
    scores, group, mask = torch.randn(6), torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = estimate(scores[order], group[order], mask)
    torch.testing.assert_close(shuffled, estimate(scores, group, mask)[order])


# --- nothing is NaN, nothing carries a gradient ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_nothing_valid_gives_zeros(shape: tuple[int, int]) -> None:
    junk, scores, mask = torch.full(shape, math.nan), torch.full(shape[:1], math.nan), torch.zeros(shape)
    group, zeros = torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape)
    assert torch.equal(token_rewards(scores, mask, junk, 0.1), zeros)
    for result in gae(junk, junk, mask, gamma=0.9, lam=0.9, bootstrap=scores):
        assert torch.equal(result, zeros)
    assert torch.equal(rewards_to_go(junk, mask, gamma=0.9), zeros)
    assert torch.equal(remax_advantages(junk, scores, mask), zeros)
    assert torch.equal(grpo_advantages(scores, group, mask), zeros)
    assert torch.equal(rloo_advantages(scores, group, mask), zeros)


def test_nan_on_a_valid_token_is_not_hidden() -> None:
    rewards, values, mask = torch.tensor([[0.0, math.nan], [1.0, 1.0]]), torch.zeros(2, 2), torch.ones(2, 2)
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.isnan().tolist() == [[True, True], [False, False]]
    assert grpo_advantages(rewards.sum(-1), torch.tensor([0, 1]), mask).isnan().tolist() == [
        [True, True],
        [False, False],
    ]


def test_targets_carry_no_gradient() -> None:
    values, scores = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    rewards = token_rewards(scores, torch.ones(2, 2), values, 0.1)
    advantages, returns = gae(values * 2, values, torch.ones(2, 2), gamma=0.9, lam=0.9, bootstrap=scores)
    assert not any(t.requires_grad for t in (rewards, advantages, returns))


def test_shapes_that_would_broadcast_are_refused() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"values \[2, 4\]"):
        gae(ones, torch.ones(2, 4), ones, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"bootstrap \[2, 1\]"):
        gae(ones, ones, ones, gamma=1.0, lam=1.0, bootstrap=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"scores \[1\]"):
        token_rewards(torch.ones(1), ones)
    with pytest.raises(ValueError, match=r"baselines \[1\]"):
        remax_advantages(ones, torch.ones(1), ones)
    with pytest.raises(ValueError, match=r"kl \[2, 1\]"):
        token_rewards(torch.ones(2), ones, torch.ones(2, 1), 0.1)
    with pytest.raises(ValueError, match=r"group \[2\]"):
        grpo_advantages(torch.ones(3), torch.zeros(2, dtype=torch.int64), torch.ones(3, 2))
