"""KL estimators and the proportional controller."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.advantages import token_rewards
from lightning_rlhf.functional.kl import KLEstimator, kl_estimate, proportional_kl_update

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo_losses.json").read_text())["cases"]
NAMES: dict[str, KLEstimator] = {"k1": "k1", "kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Names in the references and ours."""
E20 = math.exp(20)


def golden(family: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN if case["family"] == family]


def case_named(name: str) -> dict[str, Any]:
    return next(case for case in GOLDEN if case["id"] == name)


# --- estimators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", golden("kl"))
def test_estimates_match_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    logprobs, reference = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("log_prob", "ref_log_prob"))
    kind = NAMES[case["config"]["kl_penalty"]]
    value, gradient = (torch.tensor(case["outputs"][key], dtype=dtype) for key in ("kl", "grad_log_prob"))
    if case["id"] == "ex_pl_020_kl_k3_big":
        # The reference clamps the value at 10 and loses the gradient there. We clamp only the log-ratio d, at +-20, and
        # keep the derivative 1 - exp(d) at the bound: d = -40, 40, 3 on the diagonal.
        diagonal = torch.arange(3)
        value[diagonal, diagonal] = torch.tensor([math.exp(-20) + 19, E20 - 21, math.exp(3) - 4], dtype=dtype)
        gradient[diagonal, diagonal] = torch.tensor([1 - math.exp(-20), 1 - E20, 1 - math.exp(3)], dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(kl_estimate(logprobs, reference, kind), value, rtol=tolerance, atol=tolerance / 10)
    if kind == "k1":
        return  # the reference returns a gradient of 1 everywhere; see the next test
    leaf = logprobs.clone().requires_grad_()
    kl_estimate(leaf, reference, kind).sum().backward()
    torch.testing.assert_close(leaf.grad, gradient, rtol=tolerance, atol=tolerance / 10)


def test_k1_is_refused_as_a_loss_term() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"'k1' cannot be a loss term.*k2 or k3"):
        kl_estimate(logprobs, torch.zeros(1, 2), "k1")
    with torch.no_grad():
        assert kl_estimate(logprobs, torch.zeros(1, 2), "k1").tolist() == [[0.0, 0.0]]


def test_direction_is_policy_against_reference() -> None:
    """Exact KL 0.082283, not 0.087177; k1 and k3 have it as their mean under the policy."""
    policy, reference = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    for kind in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        assert mean.item() == pytest.approx(0.082283, abs=1e-6)
    reverse = (reference * kl_estimate(reference.log(), policy.log(), "k1")).sum()
    assert reverse.item() == pytest.approx(0.087177, abs=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("abs", 0.5)])
def test_estimators_of_one_token(kind: KLEstimator, expected: float) -> None:
    """The metric and the penalty are one value."""
    kl = kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), kind)
    assert kl.item() == pytest.approx(expected, abs=1e-6)
    penalty = token_rewards(torch.zeros(1), torch.ones(1, 1), kl, 0.2)
    assert penalty.item() == pytest.approx(-0.2 * expected, abs=1e-6)


@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_equal_policies_have_no_divergence(kind: KLEstimator) -> None:
    logprobs = torch.tensor([[-0.1, -30.0]])
    assert kl_estimate(logprobs, logprobs, kind).tolist() == [[0.0, 0.0]]


def test_k3_keeps_small_divergences() -> None:
    """exp(d) - 1 - d in float32 would round to 0 here."""
    kl = kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + 2**-13]]), "k3")
    assert kl.item() == pytest.approx(2**-27, rel=1e-3)


@pytest.mark.parametrize("reference", [0.0, -1e30, -math.inf])
@pytest.mark.parametrize("policy", [-1e30, -25.0])
def test_k3_is_finite_and_pulls_the_worst_tokens_back(policy: float, reference: float) -> None:
    leaf = torch.tensor([policy], requires_grad=True)
    kl = kl_estimate(leaf, torch.tensor([reference]), "k3")
    kl.sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(kl).all()
    assert torch.isfinite(leaf.grad).all()
    # Descent raises a log-probability below the reference's and lowers one above it; equal ones stay.
    assert leaf.grad.sign().item() == (policy > reference) - (policy < reference)


@given(
    st.integers(0, 2**31 - 1), st.sampled_from(["k2", "k3", "abs"]), st.sampled_from([math.nan, math.inf, -math.inf])
)
@settings(max_examples=30, deadline=None)
def test_masked_tokens_give_nothing(seed: int, kind: KLEstimator, junk: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=generator) < 0.5
    clean = torch.randn(2, 3, 4, generator=generator)

    def run(inputs: Tensor) -> tuple[Tensor, Tensor]:
        leaf = inputs[0].clone().requires_grad_()
        kl = kl_estimate(leaf, inputs[1], kind, mask=mask)
        kl.sum().backward()
        assert leaf.grad is not None
        return kl.detach(), leaf.grad

    value, gradient = run(torch.where(mask, clean, junk))
    assert (value[~mask] == 0).all()
    assert (gradient[~mask] == 0).all()
    torch.testing.assert_close(value[mask], kl_estimate(clean[0], clean[1], kind)[mask])
    torch.testing.assert_close(gradient, run(clean)[1])


def test_nan_on_a_valid_token_is_not_hidden() -> None:
    for kind in get_args(KLEstimator):
        assert kl_estimate(torch.tensor([math.nan]), torch.zeros(1), kind, mask=torch.ones(1)).isnan()


@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_no_tokens_at_all(kind: KLEstimator) -> None:
    assert kl_estimate(torch.zeros(2, 0), torch.zeros(2, 0), kind).shape == (2, 0)


def test_unknown_names_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logprobs \[2, 3\], ref_logprobs \[2, 1\]"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1), "k1")


# --- controller --------------------------------------------------------------------------------------------------


def test_controller_follows_the_reference() -> None:
    case = case_named("ex_pl_021_kl_ctl_sequence")
    beta, expected = case["config"]["init_kl_coef"], case["outputs"]["values"]
    for kl, steps, value in zip(case["inputs"]["current_kl"], case["inputs"]["n_steps"], expected, strict=True):
        beta = proportional_kl_update(
            beta, kl, target=case["config"]["target_kl"], horizon=case["config"]["horizon"], steps=steps
        )
        assert beta == pytest.approx(value, rel=1e-9)


def test_penalty_and_controller_together_follow_the_reference() -> None:
    case = case_named("ex_pl_022_apply_kl_penalty")
    inputs = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["inputs"].items()}
    config, outputs, mask = case["config"], case["outputs"], inputs["response_mask"].bool()
    kl = kl_estimate(inputs["old_log_prob"], inputs["ref_log_prob"], NAMES[config["kl_penalty"]])
    scores = (inputs["token_level_scores"] * mask).sum(-1)
    rewards = token_rewards(scores, mask, kl, config["init_kl_coef"])
    torch.testing.assert_close(rewards, torch.tensor(outputs["token_level_rewards"], dtype=torch.float64))
    mean = torch.stack([row[valid].mean() for row, valid in zip(kl, mask, strict=True)]).mean().item()
    assert mean == pytest.approx(outputs["metrics"]["actor/reward_kl_penalty"], rel=1e-6)
    beta = proportional_kl_update(
        config["init_kl_coef"], mean, target=config["target_kl"], horizon=config["horizon"], steps=len(mask)
    )
    assert beta == pytest.approx(outputs["kl_coef_after"], rel=1e-9)


@pytest.mark.parametrize(
    ("kl", "expected"), [(12, 0.100512), (3, 0.099488), (6.6, 0.100256), (6, 0.1), (math.inf, 0.100512)]
)
def test_controller_arithmetic(kl: float, expected: float) -> None:
    """0.1 x (1 + error x 256 / 10000), the relative error clipped to +-0.2."""
    assert proportional_kl_update(0.1, kl, target=6, horizon=10_000, steps=256) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"target": 0.0}, "target = 0.0"),
        ({"target": -1.0}, "target = -1.0"),
        ({"target": math.nan}, "target = nan"),
        ({"horizon": 0.0}, "horizon = 0.0"),
        ({"horizon": math.inf}, "horizon = inf"),
        ({"steps": -1.0}, "steps = -1.0"),
    ],
)
def test_controller_refuses_invalid_target_horizon_and_steps(setting: dict[str, float], message: str) -> None:
    """Target and horizon that are not above 0 or not finite, and a negative number of steps."""
    with pytest.raises(ValueError, match=message):
        proportional_kl_update(0.1, 6.0, **{"target": 6.0, "horizon": 100.0, "steps": 8.0, **setting})


def test_no_steps_change_nothing() -> None:
    assert proportional_kl_update(0.1, 12.0, target=6, horizon=10, steps=0) == 0.1


def test_nothing_measured_changes_nothing() -> None:
    assert proportional_kl_update(0.1, math.nan, target=6, horizon=10, steps=8) == 0.1


def test_the_coefficient_stays_positive_however_many_steps() -> None:
    beta = 0.1
    for _ in range(5):
        beta = proportional_kl_update(beta, 0.0, target=6, horizon=10, steps=1000)
    assert beta == pytest.approx(0.1 * 0.1**5)
