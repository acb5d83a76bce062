"""Importance weights and rejection: reference numbers, reported faults, and what padding and order must not change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional.correction import Correction, Plan, WeightLevel, bounded_weights, correct, storage_error
from lightning_rlhf.functional.log_ratio import log_ratio
from lightning_rlhf.functional.losses import ppo_policy_loss, reinforce_policy_loss
from lightning_rlhf.functional.rejection import RULES, parse_rules
from lightning_rlhf.metrics.correction import CorrectionMetrics
from lightning_rlhf.mixins.correction_settings import RolloutCorrectionSettings

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "rollout_correction.json").read_text())["cases"]
BYPASS = json.loads((FOLDER / "rollout_bypass.json").read_text())["cases"]
LEVELS = get_args(WeightLevel)
JUNK = [None, math.nan, math.inf, -math.inf]
"""What padding holds: as given, or one of these."""


def settings_of(case: dict[str, Any]) -> RolloutCorrectionSettings:
    config = dict(case["config"])
    if case["interface"] == "oldest":
        config["rollout_is"] = config.pop("rollout_is_level")
        config["rollout_token_veto_threshold"] = config.pop("rollout_is_veto_threshold")
    return RolloutCorrectionSettings(**config)


def inputs_of(case: dict[str, Any], dtype: torch.dtype, junk: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    pair = [torch.tensor(case["inputs"][name], dtype=dtype) for name in ("old_log_prob", "rollout_log_prob")]
    train, rollout = (x if junk is None else torch.where(mask, x, junk) for x in pair)
    return train, rollout, mask


def metrics_of(correction: Correction, train: Tensor, rollout: Tensor, *, full: bool = True) -> dict[str, float]:
    metrics = CorrectionMetrics(full=full)
    metrics.update(correction, train, rollout)
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.compute().items()}


def cases(*, error: bool) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN if bool(case.get("error")) == error]


# --- reference numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", cases(error=False))
def test_weights_and_masks_match_the_references(case: dict[str, Any], dtype: torch.dtype, junk: float | None) -> None:
    train, rollout, mask = inputs_of(case, dtype, junk)
    found, expected = correct(train, rollout, mask, settings_of(case).plan), case["outputs"]
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 1e-6}
    if expected["rollout_is_weights"] is not None and settings_of(case).rollout_is is not None:
        assert found.weights is not None
        torch.testing.assert_close(
            found.weights, torch.tensor(expected["rollout_is_weights"], dtype=dtype), **tolerance
        )
    if expected["modified_response_mask"] is not None:
        assert found.keep.long().tolist() == torch.tensor(expected["modified_response_mask"]).long().tolist()


@pytest.mark.parametrize("case", cases(error=False))
def test_metrics_match_the_references(case: dict[str, Any]) -> None:
    train, rollout, mask = inputs_of(case, torch.float64)
    plan = settings_of(case).plan
    found = metrics_of(correct(train, rollout, mask, plan), train, rollout)
    compared = 0
    for key, reference in case["outputs"]["metrics"].items():
        name = key.partition("/")[2].removeprefix("mismatch_")
        if plan.veto is None and name in ("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction"):
            assert reference == 0 and name not in found, "without a veto there is nothing to report"
            continue
        expected = deviation(case, name, float(reference))
        tolerance = 1e-4 if name.endswith("_std") else 1e-8
        assert found[name] == pytest.approx(expected, rel=1e-6, abs=tolerance), name
        compared += 1
    assert compared >= 11


def test_every_rejection_rule_and_weight_level_is_compared() -> None:
    compared = {rule.name for case in GOLDEN if not case.get("error") for rule in settings_of(case).plan.rules}
    assert {"token", "sequence", "geometric", "token_k1", "token_k2", "token_k3", "seq_sum_k1"} <= compared
    assert {settings_of(case).rollout_is for case in GOLDEN if not case.get("error")} == {*LEVELS, None}


def deviation(case: dict[str, Any], name: str, reference: float) -> float:
    """The value that our definitions give where they are not the reference's; else the reference itself.

    * k3 clamps the log-ratio to +-20 before ``exp``; the reference's exp(50) would be 1e20 times larger.
    * A row without a valid token is in no statistic of rows. The reference gives it weight 0, ratio 1, log-perplexity
      0 and perplexity 1 and divides by all N rows: of its mean m, what it added is taken back, (m N - added) / (N - 1).
    """
    mask = np.array(case["inputs"]["response_mask"], dtype=bool)
    gap = np.array(case["inputs"]["old_log_prob"]) - np.array(case["inputs"]["rollout_log_prob"])
    if name == "k3_kl" and np.abs(gap[mask]).max() > 20:
        u = gap[mask].clip(-20, 20)
        return float((np.exp(u) - u - 1).mean())
    rows = list(mask.any(-1))
    if all(rows):
        return reference
    added = {
        **dict.fromkeys(["training_log_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq"], 0),
        **dict.fromkeys(["training_ppl", "rollout_ppl", "ppl_ratio"], 1),
        **dict.fromkeys(["rollout_is_seq_mean", "rollout_is_seq_fraction_high", "rollout_rs_seq_mean"], 0),
        **dict.fromkeys(["rollout_is_seq_fraction_low", "rollout_rs_seq_fraction_low"], 1),
        **dict.fromkeys(["rollout_rs_seq_fraction_high", "rollout_rs_seq_masked_fraction"], 0),
    }
    if case["config"]["rollout_is"] == "sequence":
        added["rollout_is_ratio_fraction_high"] = added["rollout_is_ratio_fraction_low"] = 0
    if case["config"]["rollout_rs"] == "sequence":
        added["rollout_rs_ratio_fraction_high"] = added["rollout_rs_ratio_fraction_low"] = 0
    if name in added:
        return (reference * len(rows) - added[name]) / sum(rows)
    of_rows = {"rollout_is": case["config"]["rollout_is"], "rollout_rs": case["config"]["rollout_rs"]}
    kind, _, statistic = name.rpartition("_seq_") if "_seq_" in name else name.rpartition("_")
    if name.endswith("_max_deviation"):
        kind, statistic = name.removesuffix("_seq_max_deviation"), "max_deviation"
    level = of_rows.get(kind, "")
    per_row = "_seq_" in name or level in ("sequence", "geometric")
    if name == "log_ppl_diff_max" or name == "log_ppl_diff_min":
        d = [-gap[i][mask[i]].mean() for i in range(len(rows)) if rows[i]]
        return max(d) if name.endswith("max") else min(d)
    if kind in of_rows and per_row and statistic in ("max", "min", "std", "max_deviation"):
        if statistic == "std" and "_seq_" not in name:
            return reference  # over tokens
        w = [row_weight(gap[i][mask[i]], str(level)) for i in range(len(rows)) if rows[i]]
        return {"max": max(w), "min": min(w), "std": float(np.std(w, ddof=1)),
                "max_deviation": max(abs(x - 1) for x in w)}[statistic]  # fmt: skip
    return reference


def row_weight(gap: np.ndarray, level: str) -> float:
    """Mean weight of one row, by hand."""
    return float({"token": np.exp(gap).mean(), "sequence": np.exp(gap.sum()), "geometric": np.exp(gap.mean())}[level])


@pytest.mark.parametrize("case", cases(error=True))
def test_what_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rollout_rs_threshold"):
        settings_of(case)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in BYPASS if c["family"] == "bypass_loss"])
def test_bypass_losses_match_the_references(case: dict[str, Any]) -> None:
    config, expected = case["config"], case["outputs"]
    inputs = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["inputs"].items()}
    logprobs, rollout = inputs["log_prob"].requires_grad_(), inputs["rollout_log_prob"]
    plan = RolloutCorrectionSettings(bypass_mode=True, **config["rollout_correction"]).plan
    mask = inputs["response_mask"].bool()
    correction = correct(logprobs.detach(), rollout, mask, plan)
    if config["rollout_correction"]["loss_type"] == "ppo_clip":
        found = ppo_policy_loss(logprobs, rollout, inputs["advantages"], correction.keep, dual_clip=3.0)
    else:
        found = reinforce_policy_loss(
            logprobs, rollout, inputs["advantages"], correction.keep, weights=correction.weights
        )
    assert found.loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    found.loss.backward()
    assert logprobs.grad is not None
    gradient = torch.tensor(expected["grad_log_prob"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-6, atol=1e-9)
    metrics = metrics_of(correction, logprobs.detach(), rollout)
    for key, value in expected["metrics"].items():
        group, _, name = key.partition("/")
        if group == "rollout_corr" and name in metrics:
            tolerance = 1e-4 if name.endswith("_std") else 1e-8
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=tolerance), name


def test_probability_differences_match_the_reference() -> None:
    [case] = [case for case in BYPASS if case["family"] == "consistency"]
    train, rollout, mask = inputs_of(case, torch.float64)
    found = metrics_of(correct(train, rollout, mask, Plan()), train, rollout, full=False)
    for key, value in case["outputs"]["metrics"].items():
        name = key.partition("/")[2]
        if not name.endswith("_valid"):
            assert found[name] == pytest.approx(value, rel=1e-6), name


# --- by hand -----------------------------------------------------------------------------------------------------


def weights_for(ratios: list[list[float]], mask: list[list[int]] | None = None, **plan: Any) -> Correction:
    """The correction of rows of log-ratios, given as the trainer's side against an engine at -1."""
    gap = torch.tensor(ratios, dtype=torch.float64)
    valid = torch.ones_like(gap, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return correct(gap - 1, torch.full_like(gap, -1.0), valid, Plan(**plan))


def test_masked_weights_are_zero_outside_the_band() -> None:
    found = weights_for([[math.log(0.4), math.log(0.6), 0.0, math.log(2.5)]], level="token", mode="mask")
    torch.testing.assert_close(found.weights, torch.tensor([[0.0, 0.6, 1.0, 0.0]], dtype=torch.float64))
    assert found.keep.all(), "masking a weight rejects nothing: the token stays in the denominator"
    lower = weights_for([[math.log(0.4), math.log(0.6)]], level="token", mode="mask", floor=0.3)
    torch.testing.assert_close(lower.weights, torch.tensor([[0.4, 0.6]], dtype=torch.float64))
    edges = torch.tensor([[0.25, 4.0]])
    assert bounded_weights(edges, Plan(level="token", mode="mask", cap=4.0)).tolist() == edges.tolist(), "bounds stay"
    assert bounded_weights(edges, Plan(level="token", mode="mask", cap=4.0, floor=0.26)).tolist() == [[0.0, 4.0]]


def test_normalised_weights_are_over_accepted_tokens_and_capped_again() -> None:
    """Weights 2, 1, 0.25 (rejected), cap 2: mean of the accepted 1.5, so 4/3, 2/3, 1/6."""
    ratios = [[math.log(2), 0.0, math.log(0.25)]]
    found = weights_for(ratios, level="token", normalise=True, rules=parse_rules("token", 3.0))
    torch.testing.assert_close(found.weights, torch.tensor([[4 / 3, 2 / 3, 1 / 6]], dtype=torch.float64))
    capped = weights_for([[math.log(8), math.log(0.25), math.log(0.25)]], level="token", cap=2.0, normalise=True)
    # min(8, 2) = 2, mean (2 + 0.25 + 0.25) / 3 = 0.8333: 2.4 is over the cap again.
    torch.testing.assert_close(capped.weights, torch.tensor([[2.0, 0.3, 0.3]], dtype=torch.float64))


def test_normalised_row_weights_count_each_row_once() -> None:
    """Products 2 (one token) and 1 (three tokens): mean 1.5 over rows, not 1.25 over tokens."""
    ratios, mask = [[math.log(2), 0, 0], [0, 0, 0]], [[1, 0, 0], [1, 1, 1]]
    found = weights_for(ratios, mask, level="sequence", normalise=True, cap=3.0)
    assert found.factor == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rows", "product", "mean"), [(4, 1.040811, 1.010050), (200, 7.389056, 1.010050)], ids=["4", "200"]
)
def test_product_and_geometric_mean_run_over_valid_tokens(rows: int, product: float, mean: float) -> None:
    """Padding with a log-ratio of 5 is in neither, however long the row."""
    ratios, mask = [[0.01] * rows + [5.0] * 6], [[1] * rows + [0] * 6]
    for level, expected in (("sequence", product), ("geometric", mean)):
        found = weights_for(ratios, mask, level=level, cap=100.0)
        assert found.weights is not None and found.weights[0, 0].item() == pytest.approx(expected, rel=1e-6)
        assert found.weights[0, rows:].eq(0).all()


def test_the_weight_carries_no_gradient() -> None:
    """p 0.4, engine 0.2, A 1, loss -w A log p: the derivative in log p is -2; a leaky weight would give -0.167."""
    logprobs = torch.tensor([[math.log(0.4)]], dtype=torch.float64, requires_grad=True)
    rollout, one = torch.tensor([[math.log(0.2)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    found = correct(logprobs, rollout, one.bool(), Plan(level="token", cap=3.0))
    assert not any(x.requires_grad for x in (found.weights, found.raw, *found.ratio) if x is not None)
    reinforce_policy_loss(logprobs, rollout, one, one.bool(), weights=found.weights).loss.backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-2.0, rel=1e-12)


@pytest.mark.parametrize("padding", [False, True])
def test_an_overflowing_ratio_that_is_rejected_leaves_no_trace(padding: bool) -> None:
    """Log-ratios 0 and 200, band [0.5, 5], A 1, current = old: loss -1, gradient [-1, 0], all finite."""
    old = torch.tensor([[-1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -201.0]])
    mask = torch.tensor([[True, not padding]])
    logprobs = old.clone().requires_grad_()
    plan = Plan(level="token", cap=5.0, rules=parse_rules("token", 5.0, 0.5))
    found = correct(old, rollout, mask, plan)
    assert found.keep.tolist() == [[True, False]]
    previous = torch.tensor([[-1.0, -200.0]]) if padding else old
    loss = ppo_policy_loss(logprobs, previous, torch.ones(1, 2), found.keep, weights=found.weights).loss
    loss.backward()
    assert loss.item() == -1.0 and logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, 0.0]]
    assert all(math.isfinite(value) for value in metrics_of(found, old, rollout).values())


def test_temperature_acts_on_logits_and_cannot_be_undone_on_a_log_probability() -> None:
    """Logits [2, 0], temperature 0.5. Scored under it on both sides the ratio is 1; against raw ones it is not."""
    logits = torch.tensor([2.0, 0.0])
    scored = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(scored, torch.tensor([-0.018150, -4.018150]), atol=1e-5, rtol=0)
    token, mask = scored[:1].view(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert correct(token, token.clone(), mask, Plan(level="token")).weights == pytest.approx(1.0, abs=1e-5)
    raw = logits.log_softmax(-1)[:1].view(1, 1)
    for wrong in (raw, raw / 0.5):
        assert abs(correct(token, wrong, mask, Plan(level="token")).weights.item() - 1) > 0.1  # type: ignore[union-attr]


def test_truncated_sampling_lowers_every_ratio_by_the_mass_kept() -> None:
    """p (0.5, 0.3, 0.2), top-k 2: 0.8 for both tokens; 1 after scoring on the same support."""
    trainer = torch.tensor([[0.5, 0.3]]).log()
    engine = torch.tensor([[0.625, 0.375]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    naive = correct(trainer, engine, mask, Plan(level="token")).weights
    torch.testing.assert_close(naive, torch.tensor([[0.8, 0.8]]))
    replayed = correct(trainer - math.log(0.8), engine, mask, Plan(level="token")).weights
    torch.testing.assert_close(replayed, torch.ones(1, 2))


# --- missing and broken log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_log_probability_is_neutral_or_rejects_its_row(level: WeightLevel, broken: float) -> None:
    train = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    rollout = torch.tensor([[-1.5, broken, -1.5], [-1.5, -1.5, -1.5]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    neutral = correct(train, rollout, mask, Plan(level=level, cap=10.0))
    expected = {"token": [math.e**0.5, 1.0, math.e**0.5], "sequence": [math.e] * 3, "geometric": [math.e**0.5] * 3}
    assert neutral.weights is not None
    torch.testing.assert_close(neutral.weights[0], torch.tensor(expected[level]))
    assert neutral.keep.all()
    rejected = correct(train, rollout, mask, Plan(level=level, cap=10.0, missing="reject"))
    assert rejected.keep.any(-1).tolist() == [False, True]
    for found in (neutral, rejected):
        metrics = metrics_of(found, train, rollout)
        assert metrics["missing_fraction"] == pytest.approx(1 / 6)
        assert metrics["kl"] == pytest.approx(-0.5), "over the tokens that were measured"
        assert all(math.isfinite(value) for value in metrics.values())


def test_nan_of_the_trainer_is_not_hidden_by_rejection() -> None:
    """It has to reach the loss, where the step is refused and said so."""
    train = torch.tensor([[math.nan, -1.0]])
    plan = Plan(level="token", mode="mask", rules=parse_rules("token,seq_max_k3", "2.0,0.5"), veto=1e-4)
    found = correct(train, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool), plan)
    assert found.keep.all() and found.weights is not None and found.weights[0, 0].isnan()


# --- lower precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cap", [0.9, 1.0, 1.1, 2.0, 2.5, 4.0, 5.0])
def test_the_bound_of_the_storage_error_is_one_and_is_reached(dtype: torch.dtype, cap: float) -> None:
    """Every float32 weight between two neighbours of the format near the cap, and a fine grid over [0, cap]."""
    near_cap = torch.tensor(cap, dtype=torch.float32) * (1 - torch.linspace(0, 0.02, 200_001))
    grid = torch.cat([near_cap, torch.linspace(0, cap, 200_001)])
    error = (grid.to(dtype).float() - grid).abs().max().item()
    bound = storage_error(dtype, cap)
    assert 0.9 * bound <= error <= bound


@pytest.mark.parametrize("level", LEVELS)
def test_float16_weights_are_the_same_to_a_thousandth(level: WeightLevel) -> None:
    generator = torch.Generator().manual_seed(0)
    gap = torch.randn(256, 64, generator=generator) * 0.5
    found = correct(gap, torch.zeros_like(gap), torch.ones_like(gap).bool(), Plan(level=level, cap=4.0))
    assert found.weights is not None
    settings_ = RolloutCorrectionSettings(rollout_is=level, rollout_is_threshold=4.0, rollout_is_dtype="float16")
    assert (found.weights.to(settings_.storage).float() - found.weights).abs().max() <= 1e-3


def test_log_probabilities_in_low_precision_are_subtracted_in_float32() -> None:
    train, rollout = torch.tensor([[-10.0625]], dtype=torch.bfloat16), torch.tensor([[-10.0]], dtype=torch.float32)
    ratio = log_ratio(train, rollout, torch.ones(1, 1, dtype=torch.bool))
    assert ratio.token.dtype == torch.float32 and ratio.token.item() == -0.0625


# --- properties ------------------------------------------------------------------------------------------------------

PLANS = [
    Plan(level=level, cap=1.5, mode=mode, normalise=normalise, rules=rules, veto=1e-2)  # type: ignore[arg-type]
    for level in LEVELS
    for mode, normalise in (("truncate", False), ("truncate", True), ("mask", False))
    for rules in (parse_rules("token", 1.3), parse_rules("geometric,seq_max_k3", "1.2,0.1"))
]


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    rollout = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    train = rollout + draw(st.sampled_from([0.01, 0.3, 3.0])) * torch.randn(
        rows, columns, generator=generator, dtype=torch.float64
    )
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    return train, rollout, torch.arange(columns) < lengths


@given(batches(), st.sampled_from(PLANS))
@settings(max_examples=60, deadline=None)
def test_identical_policies_have_weight_one_and_reject_nothing(
    batch: tuple[Tensor, Tensor, Tensor], plan: Plan
) -> None:
    _, rollout, mask = batch
    for rules in (plan.rules, parse_rules("sequence", 1.0), parse_rules("seq_sum_k2", 1e-9)):
        found = correct(rollout, rollout.clone(), mask, replace(plan, rules=rules))
        assert found.weights is not None and torch.equal(found.weights, mask.to(found.weights.dtype))
        assert torch.equal(found.keep, mask)


@given(batches(), st.sampled_from(PLANS), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_padding_and_order_change_nothing(
    batch: tuple[Tensor, Tensor, Tensor], plan: Plan, pads: int, random: Any
) -> None:
    train, rollout, mask = batch
    order = list(range(len(mask)))
    random.shuffle(order)

    def changed(x: Tensor, filler: float) -> Tensor:
        return torch.cat([x[order], torch.full((len(x), pads), filler).to(x.dtype)], dim=1)

    plain = correct(train, rollout, mask, plan)
    other_inputs = changed(train, math.nan), changed(rollout, math.inf), changed(mask, 0)
    other = correct(*other_inputs, plan)
    columns = mask.shape[1]
    assert torch.equal(other.keep[:, :columns], plain.keep[order]) and not other.keep[:, columns:].any()
    assert plain.weights is not None and other.weights is not None
    torch.testing.assert_close(other.weights[:, :columns], plain.weights[order], rtol=1e-12, atol=1e-12)
    before, after = metrics_of(plain, train, rollout), metrics_of(other, *other_inputs[:2])
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name] == pytest.approx(value, rel=1e-9, abs=1e-7 if name.endswith("std") else 1e-9), name


@given(batches(), st.integers(0, 4), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_one_extreme_token_vetoes_its_own_row_only(batch: tuple[Tensor, Tensor, Tensor], row: int, column: int) -> None:
    _, rollout, mask = batch
    row, column = row % mask.shape[0], column % mask.shape[1]
    train = rollout.clone()
    train[row, column] -= 9.3
    found = correct(train, rollout, mask, Plan(veto=1e-4))
    expected = mask.clone()
    if mask[row, column]:
        expected[row] = False
    assert torch.equal(found.keep, expected)


@given(batches())
@settings(max_examples=20, deadline=None)
def test_all_rejected_is_finite_and_zero(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    train, rollout, mask = batch
    plan = Plan(level="token", normalise=True, rules=parse_rules("token", "1000.0_1001.0"))
    found = correct(train, rollout, mask, plan)
    assert not found.keep.any() and found.weights is not None and found.weights.isfinite().all()
    logprobs = train.clone().requires_grad_()
    loss = ppo_policy_loss(logprobs, train, torch.ones_like(train), found.keep, weights=found.weights).loss
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad is not None and logprobs.grad.eq(0).all()
    assert all(math.isfinite(value) for value in metrics_of(found, train, rollout).values())


@given(batches(), st.sampled_from(sorted(RULES)), st.floats(1.0, 4.0))
@settings(max_examples=60, deadline=None)
def test_a_wider_band_accepts_more(batch: tuple[Tensor, Tensor, Tensor], name: str, factor: float) -> None:
    train, rollout, mask = batch
    narrow = Plan(rules=parse_rules(name, 1.2))
    wide = narrow.adjusted(narrow.cap, factor)
    assert (correct(train, rollout, mask, narrow).keep & ~correct(train, rollout, mask, wide).keep).sum() == 0
