"""Policy and value loss: reference numbers, reported faults, and what padding and cuts must not change."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.losses import (
    Aggregation,
    LossScale,
    aggregate,
    ppo_policy_loss,
    reinforce_policy_loss,
    value_loss,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo_losses.json").read_text())["cases"]
MODES = get_args(Aggregation)
JUNK = [None, math.nan, math.inf, -math.inf]
"""What padding holds: as given, or one of these."""
DTYPES = [torch.float64, torch.float32]


def golden(family: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN if case["family"] == family]


def tensors(case: dict[str, Any], dtype: torch.dtype, junk: float | None) -> dict[str, Tensor]:
    """The inputs of a golden case; masked slots hold ``junk``."""
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    result = {}
    for name, values in case["inputs"].items():
        tensor = torch.tensor(values, dtype=dtype)
        if tensor.ndim == 1:
            tensor = tensor.unsqueeze(1).expand(mask.shape)
        result[name] = tensor if junk is None else torch.where(mask, tensor, junk)
    return {**result, "response_mask": mask}


def close(actual: Tensor | float, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5
    expected = torch.as_tensor(expected, dtype=dtype)
    torch.testing.assert_close(torch.as_tensor(actual, dtype=dtype), expected, rtol=tolerance, atol=tolerance / 10)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask].double().mean()


# --- reference numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", golden("policy_loss"))
def test_policy_loss_matches_the_references(case: dict[str, Any], dtype: torch.dtype, junk: float | None) -> None:
    config, inputs, expected = case["config"], tensors(case, dtype, junk), case["outputs"]
    mask = inputs["response_mask"]
    logprobs = inputs["log_prob"].clone().requires_grad_()
    gspo = case["id"] == "ex_pl_015_gspo_basic"  # its function knows no dual clip
    mode = config.get("loss_agg_mode", "token-mean")
    low, high = (config.get(key) or config.get("clip_ratio") or 0.2 for key in ("clip_ratio_low", "clip_ratio_high"))
    result = ppo_policy_loss(
        logprobs,
        inputs["old_log_prob"],
        inputs["advantages"],
        mask,
        clip_low=low,
        clip_high=high,
        dual_clip=None if gspo else config.get("clip_ratio_c", config.get("delta")),
        weights=inputs.get("rollout_is_weights"),
        ratio_level="sequence" if gspo else "token",
        scale=LossScale(mode),
    )
    result.loss.backward()
    # Dr. GRPO divides by sequences x horizon, all ranks; veRL by the horizon alone. Every row here has a valid token.
    scale = 1 / len(mask) if mode == "seq-mean-token-sum-norm" else 1.0
    close(result.loss.detach(), expected["loss"] * scale, dtype)
    assert logprobs.grad is not None
    close(logprobs.grad, torch.tensor(expected["grad_log_prob"], dtype=torch.float64) * scale, dtype)
    metrics = expected["metrics"]
    if "actor/pg_clipfrac" in metrics:
        close(masked_mean(result.clipped, mask), metrics["actor/pg_clipfrac"])
        close(masked_mean(result.clipped_lower, mask), metrics["actor/pg_clipfrac_lower"])
        # The reference averages the clamped log-ratio; our estimator k1 is not clamped.
        kl = kl_estimate(inputs["old_log_prob"], inputs["log_prob"], "k1").clamp(-20, 20)
        close(masked_mean(kl, mask), metrics["actor/ppo_kl"], dtype)
    else:
        close(masked_mean(result.clipped, mask), metrics["clip_ratio/region_mean"])


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", golden("value_loss"))
def test_value_loss_matches_the_reference(case: dict[str, Any], dtype: torch.dtype, junk: float | None) -> None:
    inputs, mask = tensors(case, dtype, junk), torch.tensor(case["inputs"]["response_mask"]).bool()
    values = inputs["vpreds"].clone().requires_grad_()
    result = value_loss(
        values,
        inputs["values"],
        inputs["returns"],
        mask,
        clip=case["config"]["cliprange_value"],
        scale=LossScale(case["config"]["loss_agg_mode"]),
    )
    result.loss.backward()
    close(result.loss.detach(), case["outputs"]["vf_loss"], dtype)
    assert values.grad is not None
    close(values.grad, case["outputs"]["grad_vpreds"], dtype)
    close(masked_mean(result.clipped, mask), case["outputs"]["vf_clipfrac"])


# --- reported faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [(-1, 0.5, 0.8, 0), (-1, 2, 2, 2), (1, 0.5, -0.5, -0.5), (1, 2, -1.2, 0)],
)
def test_the_clip_is_the_minimum_of_products(advantage: float, ratio: float, loss: float, gradient: float) -> None:
    """Not of ratios, and the lower bound is 1 - epsilon."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    result = ppo_policy_loss(logprobs, torch.zeros(1, 1), torch.full((1, 1), float(advantage)), torch.ones(1, 1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert result.clipped.item() is (gradient == 0)


def test_clip_fraction_and_kl_are_means_over_valid_tokens() -> None:
    """``clipped`` counts active clips (1/3); two of three ratios lie outside the band."""
    logprobs, mask = torch.tensor([[1.5, 0.5, 1.0, 9.0]]).log(), torch.tensor([[True, True, True, False]])
    old = torch.zeros_like(logprobs)
    result = ppo_policy_loss(logprobs, old, torch.tensor([[1.0, 1.0, -1.0, 1.0]]), mask)
    assert masked_mean(result.clipped, mask).item() == pytest.approx(1 / 3)
    assert not result.clipped[0, 3]
    assert masked_mean((result.ratio - 1).abs() > 0.2, mask).item() == pytest.approx(2 / 3)
    for kind in ("k1", "k3"):
        assert masked_mean(kl_estimate(old, logprobs, kind), mask).item() == pytest.approx(0.095894, abs=1e-6)


def test_micro_batches_add_up() -> None:
    """One token with loss 4 and three with 0, cut 1 + 3, are 1.0; the mean of micro-batch means is 2.0."""
    loss, mask = torch.tensor([[4.0, 0, 0], [0, 0, 0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    parts = [aggregate(loss[i : i + 1], mask[i : i + 1], LossScale(tokens=4.0)) for i in range(2)]
    assert torch.stack(parts).sum().item() == aggregate(loss, mask).item() == 1.0


def test_the_numerator_is_masked() -> None:
    """Losses of padding, however large, reach neither the mean nor the gradient."""
    loss = torch.tensor([[2.0, 50.0], [4.0, -10.0]], requires_grad=True)
    result = aggregate(loss, torch.tensor([[1, 0], [1, 0]]))
    result.backward()
    assert result.item() == 3.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_constants_carry_no_gradient() -> None:
    """Old log-probs, advantages, weights, old values and targets are constants."""
    logprobs, old, advantages, weights = (torch.full((1, 2), x, requires_grad=True) for x in (-0.5, -0.6, 1.0, 2.0))
    mask = torch.ones(1, 2)
    result = ppo_policy_loss(logprobs, old, advantages, mask, weights=weights)
    (result.loss + value_loss(logprobs, old, advantages, mask, clip=0.5).loss).backward()
    assert logprobs.grad is not None
    assert (old.grad, advantages.grad, weights.grad) == (None, None, None)
    assert not any(t.requires_grad for t in (result.ratio, result.clipped, result.clipped_lower))


# --- aggregation -------------------------------------------------------------------------------------------------

LOSS = [[1.0, 2.0, 4.0], [10.0, 7.0, 7.0], [5.0, 5.0, 5.0]]
MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 13 / 3),
        ("seq-mean-token-sum", 13 / 2),
        ("seq-mean-token-mean", (1.5 + 10) / 2),
        ("seq-mean-token-sum-norm", 13 / (2 * 3)),
    ],
)
def test_aggregation_leaves_empty_rows_out(mode: Aggregation, expected: float) -> None:
    assert aggregate(torch.tensor(LOSS), torch.tensor(MASK), LossScale(mode)).item() == pytest.approx(expected)


def test_the_horizon_replaces_the_padded_width() -> None:
    loss, mask = torch.tensor(LOSS), torch.tensor(MASK)
    wide = torch.nn.functional.pad(loss, (0, 5)), torch.nn.functional.pad(mask, (0, 5))
    for part in ((loss, mask), wide):
        assert aggregate(*part, LossScale("seq-mean-token-sum-norm", horizon=16)).item() == pytest.approx(13 / (2 * 16))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_does_not_depend_on_the_split_into_micro_batches(
    mode: Aggregation, level: Any, as_tensor: bool
) -> None:
    """1, 2 and 4 micro-batches of unequal rows, each without its padding columns."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 1, 4, 0, 2, 7, 3, 5])
    mask = torch.arange(7) < lengths.unsqueeze(1)
    old, advantages, returns = torch.randn(3, 8, 7, generator=generator).unbind()
    start = old + 0.3 * torch.randn(8, 7, generator=generator)
    scale = LossScale(mode, tokens=float(mask.sum()), sequences=7.0, horizon=9)
    if as_tensor:
        scale = replace(scale, tokens=mask.sum(), sequences=torch.tensor(7))
    gradients = {}
    for cuts in (1, 2, 4):
        leaf = start.clone().requires_grad_()
        for rows in torch.arange(8).chunk(cuts):
            width = int(lengths[rows].max())
            part, lp = (rows, slice(0, width)), leaf[rows, :width]
            policy = ppo_policy_loss(
                lp, old[part], advantages[part], mask[part], dual_clip=3.0, ratio_level=level, scale=scale
            )
            value = value_loss(lp, old[part], returns[part], mask[part], clip=0.2, scale=scale)
            (policy.loss + value.loss).backward()
        gradients[cuts] = leaf.grad
    for cuts in (2, 4):
        torch.testing.assert_close(gradients[cuts], gradients[1], rtol=1e-6, atol=1e-7)


@given(st.integers(0, 2**31 - 1), st.sampled_from(MODES), st.sampled_from(["token", "sequence"]), st.data())
@settings(max_examples=40, deadline=None)
def test_padding_and_row_order_never_matter(seed: int, mode: Aggregation, level: Any, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    clean = torch.randn(5, rows, columns, generator=generator, dtype=torch.float64)
    dirty = torch.where(mask, clean, data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30])))

    def run(inputs: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        leaf = inputs[0].clone().requires_grad_()
        weights = inputs[4].abs()
        policy = ppo_policy_loss(
            leaf, inputs[1], inputs[2], valid, dual_clip=1.5, weights=weights, ratio_level=level, scale=LossScale(mode)
        )
        value = value_loss(leaf, inputs[1], inputs[3], valid, clip=0.3, scale=LossScale(mode))
        assert torch.isfinite(policy.ratio).all()
        with torch.autograd.set_detect_anomaly(True, check_nan=True):  # no NaN on the way either
            (policy.loss + value.loss).backward()
        assert leaf.grad is not None
        return (policy.loss + value.loss).detach(), leaf.grad

    loss, gradient = run(clean, mask)
    assert (gradient[~mask] == 0).all()
    for other in (run(dirty, mask), run(torch.nn.functional.pad(clean, (0, 2)), torch.nn.functional.pad(mask, (0, 2)))):
        scale = (columns + 2) / columns if mode == "seq-mean-token-sum-norm" and other[1].shape[1] > columns else 1.0
        torch.testing.assert_close(other[0] * scale, loss)
        torch.testing.assert_close(other[1][:, :columns] * scale, gradient)
    order = torch.randperm(rows, generator=generator)
    shuffled = run(clean[:, order], mask[order])
    torch.testing.assert_close(shuffled[0], loss)
    torch.testing.assert_close(shuffled[1], gradient[order])


# --- nothing is NaN ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
@pytest.mark.parametrize("denominator", [None, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_valid_is_zero_connected_to_the_graph(mode: Aggregation, denominator: Any, shape: Any) -> None:
    junk, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    scale = LossScale(mode, tokens=denominator, sequences=denominator)
    for level in ("token", "sequence"):
        leaf = junk.clone().requires_grad_()
        policy = ppo_policy_loss(leaf, junk, junk, mask, dual_clip=2.0, weights=junk, ratio_level=level, scale=scale)
        value = value_loss(leaf, junk, junk, mask, clip=0.2, scale=scale)
        loss = policy.loss + value.loss
        assert loss.item() == 0.0
        loss.backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros(shape))


def test_nan_on_a_valid_token_is_not_hidden() -> None:
    logprobs, ones = torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2)
    assert ppo_policy_loss(logprobs, ones, ones, ones).loss.isnan()
    assert value_loss(logprobs, ones, ones, ones, clip=0.2).loss.isnan()


def test_infinite_log_ratios_are_bounded() -> None:
    logprobs = torch.tensor([[0.0, -500.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 0.0, -math.inf]])
    result = ppo_policy_loss(logprobs, old, torch.tensor([[-1.0, -1.0, -1.0]]), torch.ones(1, 3))
    result.loss.backward()
    assert result.ratio.tolist() == [pytest.approx([math.exp(20), math.exp(-20), math.exp(20)])]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]], "the clamp ends the gradient"


def test_first_step_has_ratio_one_and_the_full_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    result = ppo_policy_loss(logprobs, logprobs.detach(), torch.tensor([[2.0, -3.0]]), torch.ones(1, 2))
    result.loss.backward()
    assert result.ratio.tolist() == [[1.0, 1.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 1.5]]


def test_a_sequence_ratio_keeps_each_token_its_own_advantage() -> None:
    """The gradient reaches token t as -A_t * ratio * grad log-prob_t, also where advantages differ within a row."""
    logprobs = torch.tensor([[0.1, -0.2, 0.4, 9.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -2.0, 3.0, 5.0]]), torch.tensor([[1, 1, 1, 0]])
    result = ppo_policy_loss(logprobs, torch.zeros(1, 4), advantages, mask, ratio_level="sequence")
    result.loss.backward()
    ratio = math.exp(0.1)
    torch.testing.assert_close(result.ratio, torch.tensor([[ratio, ratio, ratio, 1.0]]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, 2.0, -3.0, 0.0]]) * ratio / 3)


# --- settings ----------------------------------------------------------------------------------------------------


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    logprobs, advantages = torch.tensor([[1.5, 0.5]]).log(), torch.tensor([[1.0, -1.0]])
    result = ppo_policy_loss(logprobs, torch.zeros(1, 2), advantages, torch.ones(1, 2), clip_low=0.1, clip_high=0.4)
    assert result.loss.item() == pytest.approx((-1.4 + 0.9) / 2)


def test_without_a_clip_the_value_loss_is_the_squared_error() -> None:
    values = torch.tensor([[2.0, 5.0]])
    result = value_loss(values, torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    assert result.loss.item() == 0.5 * (1 + 9) / 2
    assert not result.clipped.any()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"clip_low": -0.2}, "clip_low = -0.2"),
        ({"clip_low": 1.0}, "clip_low = 1.0"),
        ({"clip_low": 0.0}, "clip_low = 0.0"),
        ({"clip_high": 0.0}, "clip_high = 0.0"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0"),
        ({"ratio_level": "row"}, "'row'.*token, sequence"),
        ({"weights": torch.ones(1, 1)}, r"weights \[1, 1\], mask \[1, 2\]"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=message):
        ppo_policy_loss(ones, ones, ones, ones, **setting)
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, seq-mean-token-sum"):
        LossScale("mean")  # type: ignore[arg-type]


def test_reinforce_is_the_weighted_log_probability_and_reports_the_ratio_to_the_engine() -> None:
    """-(1 x 2 x -1 + -3 x 0.5 x -2) / 2 = -0.5; the ratio to the engine is exp(-1 + 1.5) and exp(-2 + 1)."""
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([[-1.5, -1.0, math.nan]], dtype=torch.float64)
    advantages, weights = torch.tensor([[1.0, -3.0, 7.0]]).double(), torch.tensor([[2.0, 0.5, 7.0]]).double()
    mask = torch.tensor([[True, True, False]])
    result = reinforce_policy_loss(logprobs, rollout, advantages, mask, weights=weights)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.5, rel=1e-12)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, 0.75, 0.0]]
    assert result.ratio[0].tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0), 1.0], rel=1e-12)
    assert not result.clipped.any() and not result.clipped_lower.any()
    far = reinforce_policy_loss(logprobs.detach(), rollout + torch.tensor([-100.0, 100.0, 0.0]), advantages, mask)
    assert far.ratio[0].tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0), 1.0], rel=1e-12)
    with pytest.raises(ValueError, match=r"weights \[1, 1\], mask \[1, 3\]"):
        reinforce_policy_loss(logprobs, rollout, advantages, mask, weights=torch.ones(1, 1))


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    """Ratio 5, dual clip 3: -A r = 5 becomes 3 for A = -1; -1.2 stays for A = 1, where the upper clip acts."""
    logprobs = torch.full((1, 3), math.log(5.0), dtype=torch.float64)
    advantages = torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64)
    found = ppo_policy_loss(logprobs, torch.zeros_like(logprobs), advantages, torch.ones(1, 3), dual_clip=3.0)
    assert found.clipped_lower.tolist() == [[True, False, False]] and found.clipped.tolist() == [[False, True, False]]
    assert found.loss.item() == pytest.approx((3.0 - 1.2) / 3, rel=1e-12)


def test_shapes_that_would_broadcast_are_refused() -> None:
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"advantages \[2, 1\]"):
        ppo_policy_loss(ones, ones, torch.ones(2, 1), ones)
    with pytest.raises(ValueError, match=r"values \[2, 3\]"):
        value_loss(torch.ones(2, 3), ones, ones, ones)
    with pytest.raises(ValueError, match=r"mask \[2\]"):
        aggregate(ones, torch.ones(2))
    with pytest.raises(ValueError, match=r"value clip 0\.0"):
        value_loss(ones, ones, ones, ones, clip=0.0)
