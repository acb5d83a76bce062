"""Every pure function at the edges of its inputs: infinite, huge, equal up to rounding, empty, in low precision.

Values are compared with the same function in float64, or with numbers worked out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.advantages import (
    gae,
    grpo_advantages,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    token_rewards,
)
from lightning_rlhf.functional.correction import Plan, WeightLevel, correct
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.losses import LossScale, aggregate, ppo_policy_loss, reinforce_policy_loss, value_loss
from lightning_rlhf.functional.rejection import parse_rules
from lightning_rlhf.functional.stats import explained_variance, masked_mean, masked_moments, whiten
from lightning_rlhf.metrics.moments import RunningMoments

PLAN = Plan(level="sequence", normalise=True, rules=parse_rules("token,seq_max_k3", "5.0,3.0"), veto=1e-3)


def group_of(rows: Tensor) -> Tensor:
    return torch.arange(len(rows)) // 2


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "aggregate": lambda x, y, z, mask: aggregate(x, mask, LossScale("seq-mean-token-mean")),
    "ppo": lambda x, y, z, mask: ppo_policy_loss(x, y, z, mask, dual_clip=3.0).loss,
    "ppo sequence": lambda x, y, z, mask: ppo_policy_loss(x, y, z, mask, ratio_level="sequence").loss,
    "reinforce": lambda x, y, z, mask: reinforce_policy_loss(x, y, z, mask).loss,
    "value": lambda x, y, z, mask: value_loss(x, y, z, mask, clip=0.2).loss,
    "k1": lambda x, y, z, mask: kl_estimate(x.detach(), y, "k1", mask=mask),
    "k2": lambda x, y, z, mask: kl_estimate(x, y, "k2", mask=mask),
    "k3": lambda x, y, z, mask: kl_estimate(x, y, "k3", mask=mask),
    "token_rewards": lambda x, y, z, mask: token_rewards(torch.full(x.shape[:1], 2.0, dtype=x.dtype), mask, y, 0.1),
    "gae": lambda x, y, z, mask: gae(y, z, mask, gamma=0.9, lam=0.8)[0],
    "rewards_to_go": lambda x, y, z, mask: rewards_to_go(y, mask, gamma=0.9),
    "remax": lambda x, y, z, mask: remax_advantages(y, torch.zeros_like(y[:, :0]).sum(-1), mask),
    "grpo": lambda x, y, z, mask: grpo_advantages(_row(y, mask), group_of(y), mask),
    "rloo": lambda x, y, z, mask: rloo_advantages(_row(y, mask), group_of(y), mask),
    "whiten": lambda x, y, z, mask: whiten(y, mask),
    "mean": lambda x, y, z, mask: masked_mean(y, mask),
    "variance": lambda x, y, z, mask: masked_moments(y, mask).var,
    "explained": lambda x, y, z, mask: explained_variance(y, z, mask),
    "weights": lambda x, y, z, mask: correct(x, y, mask, PLAN).weights,  # type: ignore[dict-item, return-value]
    "keep": lambda x, y, z, mask: correct(x, y, mask, PLAN).keep.double(),
}
"""Each of three tensors ``[B, R]`` and a mask; the first one may carry a gradient."""

IN_FLOAT64 = {"grpo", "rloo", "whiten", "mean", "variance", "explained", "weights", "keep"}
HALF_IS_REFUSED = set(FUNCTIONS) - IN_FLOAT64


def _row(y: Tensor, mask: Tensor) -> Tensor:
    """One finite number per row; NaN for rows without a valid token."""
    return torch.where(mask.any(-1), torch.where(mask, y, 0.0).sum(-1), math.nan)


# --- everything, with everything ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    seed=st.integers(0, 2**31 - 1),
    shape=st.sampled_from([(0, 3), (3, 0), (1, 1), (1, 5), (4, 6), (6, 1)]),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38]),
    valid=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([0.1, 3.0]),
    cut=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_float32_equals_float64_whatever_padding_holds_and_however_tensors_lie(
    name: str, seed: int, shape: tuple[int, int], junk: float, valid: float, scale: float, cut: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    clean = scale * torch.randn(3, *shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < valid
    dirty = torch.where(mask, clean, junk)
    if cut:  # every second column of a wider tensor, rows and columns exchanged in memory
        dirty = dirty.repeat_interleave(2, -1).transpose(-1, -2).contiguous().transpose(-1, -2)[..., ::2]
        assert dirty.numel() <= 1 or not dirty[0].is_contiguous() or shape[1] <= 1
    results = []
    for inputs in (dirty, torch.where(mask, clean, 0.0).double()):
        x, y, z = (tensor.detach() for tensor in inputs)
        x = x.requires_grad_()
        found = FUNCTIONS[name](x, y, z, mask)
        if found.requires_grad:
            found.sum().backward()
        results.append((found.detach(), torch.zeros_like(x) if x.grad is None else x.grad))
    (value, gradient), (exact, exact_gradient) = results
    assert value.isfinite().all() and gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()
    # Quotients of small spreads lose digits: those of the inputs, which are float32.
    torch.testing.assert_close(value.double(), exact.double(), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_is_computed_in_higher_precision_or_refused(name: str, dtype: torch.dtype) -> None:
    """What is supported in float16 and bfloat16 equals float64 up to rounding of the result; the rest is an error."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (0.5 * torch.randn(3, 4, 6, generator=generator)).to(dtype)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    if name in HALF_IS_REFUSED:
        with pytest.raises(ValueError, match=rf"is {dtype}: float32 and float64 are allowed"):
            FUNCTIONS[name](x, y, z, mask)
        return
    exact = FUNCTIONS[name](x.double(), y.double(), z.double(), mask)
    found = FUNCTIONS[name](x, y, z, mask)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact.double(), rtol=tolerance, atol=tolerance)


# --- log-probability -inf on a valid token -----------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_without_probability_bounds_the_ratio(level: Any, advantage: float) -> None:
    """At sequence level it was NaN: -inf minus -inf, in ``own - own.detach()``."""
    logprobs = torch.tensor([[-1.0, -math.inf, -2.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    advantages, mask = torch.full((2, 3), advantage), torch.ones(2, 3)
    result = ppo_policy_loss(logprobs, old, advantages, mask, ratio_level=level)
    result.loss.backward()
    lowest = math.exp(-20)
    first = [1.0, lowest, math.exp(-1)] if level == "token" else [lowest] * 3
    assert result.ratio.tolist() == [pytest.approx(first), [1.0] * 3]
    clipped = [min(-advantage * r, -advantage * max(r, 0.8), key=lambda v: -v) for r in (*first, 1.0, 1.0, 1.0)]
    assert result.loss.item() == pytest.approx(sum(clipped) / 6, abs=1e-6)
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert logprobs.grad[1].tolist() == pytest.approx([-advantage / 6] * 3), "the other row learns"


def test_reinforce_learns_nothing_from_an_advantage_of_zero() -> None:
    """0 times -inf was NaN."""
    logprobs = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    result = reinforce_policy_loss(logprobs, torch.full((1, 2), -1.0), torch.tensor([[0.0, 2.0]]), torch.ones(1, 2))
    result.loss.backward()
    assert result.loss.item() == 1.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0.0, -1.0]]
    masked = reinforce_policy_loss(
        logprobs, torch.full((1, 2), -1.0), torch.ones(1, 2), torch.ones(1, 2), weights=torch.tensor([[0.0, 1.0]])
    )
    assert masked.loss.item() == 0.5, "a weight of 0 is no gain either"
    lost = reinforce_policy_loss(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)).loss
    assert lost.item() == math.inf, "with an advantage it is infinite, and said"


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_of_a_token_without_probability_are_bounded(level: WeightLevel) -> None:
    train, rollout = torch.tensor([[-1.0, -math.inf]]), torch.full((1, 2), -1.0)
    found = correct(train, rollout, torch.ones(1, 2), Plan(level=level, rules=parse_rules("token", 2.0), veto=1e-4))
    assert found.weights is not None and found.weights.isfinite().all()
    assert found.weights[0, 1].item() == pytest.approx(math.exp(-20))
    assert not found.keep.any(), "the veto takes the row"


# --- nothing at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0, 4)])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
def test_a_batch_without_tokens_can_be_corrected(level: WeightLevel | None, shape: tuple[int, int]) -> None:
    """R = 0 with sequence weights and normalise was an IndexError."""
    names = "token,sequence,geometric,token_k1,token_k2,seq_sum_k3,seq_mean_k1,seq_max_k2"
    nothing = torch.zeros(shape)
    plan = Plan(level=level, normalise=True, rules=parse_rules(names, 2.0), veto=1e-3, missing="reject")
    found = correct(nothing, nothing, nothing.bool(), plan)
    assert found.keep.shape == shape
    assert level is None or (found.weights is not None and found.weights.shape == shape)
    assert found.factor is None or found.factor.item() == 1.0


# --- equal up to rounding ----------------------------------------------------------------------------------------


def one_step_off(value: float = 12345.67, count: int = 8) -> Tensor:
    scores = torch.full((count,), value)
    scores[0] = torch.nextafter(scores[0], torch.tensor(math.inf))
    return scores


def test_one_float32_step_is_no_signal() -> None:
    """8 scores of 12345.67, one of them the next float32: GRPO made +2.47 of it."""
    scores, mask, group = one_step_off(), torch.ones(8, 1), torch.zeros(8, dtype=torch.int64)
    assert scores.unique().numel() == 2
    assert grpo_advantages(scores, group, mask).abs().max() == 0
    step = (scores.max() - scores.min()).item()
    assert rloo_advantages(scores, group, mask).abs().max().item() == pytest.approx(step), "not scaled, so no more"
    assert grpo_advantages(scores, group, mask, normalise_std=False).abs().max() < step
    assert whiten(scores, torch.ones(8)).abs().max() == 0
    moments = RunningMoments()
    for _ in range(3):
        moments.update(scores)
    assert moments.normalise(scores).abs().max() == 0
    assert explained_variance(torch.zeros(8), scores, torch.ones(8)) == 0


def test_rounding_in_one_group_leaves_the_others_alone() -> None:
    scores = torch.cat([one_step_off(), torch.tensor([1.0, 2.0, 3.0, 4.0])])
    group, mask = torch.tensor([0] * 8 + [1] * 4), torch.ones(12, 2)
    found = grpo_advantages(scores, group, mask)[:, 0]
    assert (found[:8] == 0).all()
    exact = (scores[8:].double() - 2.5) / (scores[8:].double().std() + 1e-6)
    torch.testing.assert_close(found[8:].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_small_spread_that_float32_can_hold_is_kept() -> None:
    """0.01 on 12345.67 is ten steps: a signal, as sharp as the scores are."""
    scores = torch.full((8,), 12345.67)
    scores[::2] += 0.05
    exact = (scores.double() - scores.double().mean()) / (scores.double().std() + 1e-6)
    found = grpo_advantages(scores, torch.zeros(8, dtype=torch.int64), torch.ones(8, 1))[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


# --- denominators ------------------------------------------------------------------------------------------------


def test_a_fractional_denominator_is_used_unchanged() -> None:
    """A fraction of a token was silently one whole token: 3 in place of 6."""
    loss, mask = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
    assert aggregate(loss, mask, LossScale(tokens=0.5)).item() == 6.0
    assert aggregate(loss, mask, LossScale(tokens=torch.tensor(0.5))).item() == 6.0
    assert aggregate(loss, mask, LossScale("seq-mean-token-sum", sequences=0.25)).item() == 12.0
    assert aggregate(loss, mask, LossScale("seq-mean-token-sum-norm", sequences=1, horizon=0.5)).item() == 6.0


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf, torch.tensor(0), torch.tensor(-2.0)])
@pytest.mark.parametrize(
    ("mode", "name"),
    [("token-mean", "tokens"), ("seq-mean-token-mean", "sequences"), ("seq-mean-token-sum-norm", "horizon")],
)
def test_invalid_denominators_are_refused(mode: Any, name: str, count: Any) -> None:
    said = rf"denominator {name} = .* is not allowed: a finite number > 0"
    with pytest.raises(ValueError, match=said):
        aggregate(torch.ones(1, 2), torch.ones(1, 2), LossScale(mode, **{name: count}))
