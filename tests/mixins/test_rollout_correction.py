"""Rollout correction in real runs: an engine whose log-probabilities are off, rejected, broken, or missing."""

from __future__ import annotations

import functools
import json
import math
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.experience import MiniBatch, PromptBatch, Rollout, split_by_tokens
from lightning_rlhf.functional.losses import LossScale, ppo_policy_loss
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.mixins.correction_settings import AdaptiveSettings, RolloutCorrectionSettings
from lightning_rlhf.models import Actor
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.settings import SettingError
from tests.support import Recorder, fit, prompts, same, tiny_module, tiny_policy, weights


class PerturbedEngine(HFEngine):
    """Reports log-probabilities that are off by noise of the given size, as an engine on other kernels does."""

    noise = 0.3
    broken: tuple[tuple[int, int], ...] = ()
    """Rows and columns whose log-probability is NaN."""

    def generate(self, prompts: PromptBatch, **options: Any) -> Rollout:
        rollout = super().generate(prompts, **options)
        generator = torch.Generator().manual_seed(int(rollout.seed.sum() % 2**31))
        noise = self.noise * torch.randn(rollout.rollout_logprobs.shape, generator=generator)
        reported = (rollout.rollout_logprobs + noise).masked_fill(~rollout.response_mask, 0.0)
        for row, column in self.broken:
            reported[row, column] = math.nan
        return replace(rollout, rollout_logprobs=reported)


def corrected(
    block: dict[str, Any] | None, *, noise: float = 0.3, broken: tuple[tuple[int, int], ...] = (), **options: Any
) -> Any:
    """A module on a perturbed engine. (``Any``: tests look at what the mixin keeps.)"""
    module = tiny_module(rollout_correction=block, **options)
    engine = PerturbedEngine(samples=2, max_new_tokens=6)
    engine.noise, engine.broken = noise, broken
    module.engine = engine
    return module


def run(block: dict[str, Any] | None, **options: Any) -> tuple[Any, Recorder, dict[str, float]]:
    options.setdefault("iterations", 2)
    recorder = Recorder()
    module = corrected(block, **options)
    trainer = fit(module, [recorder])
    return module, recorder, {name: float(value) for name, value in trainer.callback_metrics.items()}


# --- decoupled -------------------------------------------------------------------------------------------------------


def test_a_null_block_and_a_monitor_change_no_weight() -> None:
    silent, _, without = run(None)
    watched, _, with_metrics = run({"full_every": 1})
    assert same(weights(silent), weights(watched))
    assert not any(name.startswith("rollout_corr/") for name in without)
    assert with_metrics["rollout_corr/k3_kl"] > 0.01 and with_metrics["rollout_corr/chi2_token"] > 0.01
    assert watched.tail_envelope and silent.tail_envelope == []


def test_an_engine_that_agrees_has_weight_one_and_learns_the_same() -> None:
    block = {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold": 1.001}
    plain, (other, recorder, metrics) = run(None, noise=0.0)[0], run(block, noise=0.0)
    for experience, _ in recorder.of("on_experience_ready"):
        valid = experience.response_mask
        torch.testing.assert_close(experience.is_weights[valid], torch.ones_like(experience.is_weights[valid]))
        assert torch.equal(experience.loss_mask, valid)
    assert metrics["rollout_corr/is_used_ess"] == pytest.approx(1.0, abs=1e-6)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-3, atol=1e-5)


def test_the_loss_is_weighted_by_trainer_over_engine() -> None:
    module, recorder, _ = run({"rollout_is": "token", "rollout_is_threshold": 1.2}, iterations=1)
    [(experience, _)] = recorder.of("on_experience_ready")
    expected = (experience.old_logprobs - experience.rollout_logprobs).exp().clamp(max=1.2)
    torch.testing.assert_close(experience.is_weights, expected.masked_fill(~experience.response_mask, 0.0))
    batch = whole(experience)
    found = module.policy_loss(batch, experience.old_logprobs).loss
    by_hand = -(expected * experience.advantages)[experience.loss_mask].mean()
    torch.testing.assert_close(found, by_hand)


def whole(experience: Any, mode: Any = "token-mean") -> MiniBatch:
    counts = experience.loss_mask.sum(-1)
    rows = torch.arange(len(experience))
    scale = LossScale(mode, tokens=float(counts.sum()), sequences=float((counts > 0).sum()), horizon=8)
    return MiniBatch.from_experience(experience, rows, scale)


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_rejected_rows_leave_baselines_whitening_and_denominators(estimator: str) -> None:
    policy = tiny_policy(critic="separate" if estimator == "gae" else "none")
    block = {"rollout_rs": "sequence", "rollout_rs_threshold": 1.5}
    _, recorder, metrics = run(block, iterations=1, policy=policy, advantage={"estimator": estimator}, noise=0.2)
    [(experience, _)] = recorder.of("on_experience_ready")
    rows = experience.loss_mask.any(-1)
    assert 0 < rows.sum() < len(rows)
    share = 1 - rows.sum().item() / len(rows)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(share)
    assert (experience.advantages[~rows] == 0).all()
    trained = sum(stats.tokens for stats in recorder.of("on_before_step") if stats.epoch == 0)
    assert trained == experience.loss_mask.sum()
    kept = experience.advantages[experience.loss_mask]
    if estimator in ("gae", "reinforce_plus_plus"):
        assert kept.mean().abs() < 1e-5 and kept.std() == pytest.approx(1.0, abs=1e-3)
    else:
        for group in experience.group.unique():
            members = (experience.group == group) & rows
            first = experience.advantages[members][:, 0]
            assert first.sum().abs() < 1e-4, "the mean is that of the members that are left"
            assert members.sum() > 1 or (first == 0).all()


def test_a_batch_that_is_rejected_as_a_whole_is_a_no_op() -> None:
    states: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    class Keep(RLHFCallback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            states.append(self.state(module))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            states.append(self.state(module))

        def state(self, module: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            moments = module.optimizers().optimizer.state.values()
            return weights(module), {
                f"{i}.{k}": v.clone() for i, entries in enumerate(moments) for k, v in entries.items()
            }

    class RejectsSecond(PerturbedEngine):
        def generate(self, prompts: PromptBatch, **options: Any) -> Rollout:
            self.noise = 5.0 if self.policy_version > 0 else 0.0
            return super().generate(prompts, **options)

    block = {"rollout_is": "token", "rollout_rs": "sequence", "rollout_rs_threshold": 1.001, "full_every": 1}
    module = tiny_module(iterations=2, rollout_correction=block, actor={"lr": 1e-3, "weight_decay": 0.1})
    module.engine = RejectsSecond(samples=2, max_new_tokens=6)
    trainer = fit(module, [Keep()])
    assert not same(states[0][0], states[1][0]), "the first batch trains"
    assert same(states[2][0], states[3][0]) and same(states[2][1], states[3][1])
    metrics = trainer.callback_metrics
    assert metrics["stability/empty_minibatches"] == 4 and metrics["rollout_corr/accepted_fraction"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("missing", ["neutral", "reject"])
def test_broken_log_probabilities_of_the_engine_are_counted_and_never_nan(missing: str, bypass: bool) -> None:
    block = {"missing_logprobs": missing, "full_every": 1, "bypass_mode": bypass, "rollout_rs": "token"}
    block |= {"rollout_rs_threshold": 100.0} if bypass else {"rollout_is": "token", "rollout_rs_threshold": 100.0}
    module, recorder, metrics = run(block, broken=((1, 0), (4, 0)), iterations=2)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())
    assert metrics["stability/nonfinite_steps"] == 0
    for experience, _ in recorder.of("on_experience_ready"):
        lengths, kept = experience.response_mask.sum(-1), experience.loss_mask.sum(-1)
        lost = (lengths - kept)[[1, 4]].tolist()
        whole_rows = lengths[[1, 4]].tolist()
        assert lost == (whole_rows if missing == "reject" else [int(bypass)] * 2)
        if not bypass and missing == "neutral":
            assert experience.is_weights[1, 0] == 1.0
    if not bypass:
        generated = recorder.of("on_experience_ready")[-1][0].response_mask.sum().item()
        assert metrics["rollout_corr/missing_fraction"] == pytest.approx(2 / generated)


def test_a_nan_log_probability_ends_a_run_without_correction_and_spoils_no_metric_of_a_monitor() -> None:
    with pytest.raises(FloatingPointError, match=r"response token 0 .*rollout_correction=monitor"):
        run(None, broken=((1, 0),))
    _, _, metrics = run({"full_every": 1}, broken=((1, 0),))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/logprob_abs_diff_mean"] > 0 and metrics["rollout_corr/k3_kl"] > 0


# --- bypass ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_bypass_computes_no_old_log_probabilities(critic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[bool] = []
    forward = Actor.forward

    def counted(self: Actor, *args: Any, **kwargs: Any) -> Any:
        scored.append(torch.is_grad_enabled())
        return forward(self, *args, **kwargs)

    policy = tiny_policy(critic=critic, reference="none")  # checks its head by forward passes of its own
    monkeypatch.setattr(Actor, "forward", counted)
    _, recorder, metrics = run({"bypass_mode": True}, policy=policy, kl={"coefficient": 0.0})
    assert scored.count(False) == 0 and scored.count(True) > 0
    assert "entropy/mean" not in metrics and "rollout/logprob_abs_diff_mean" not in metrics
    for experience, stats in recorder.of("on_experience_ready"):
        assert torch.equal(experience.old_logprobs, experience.rollout_logprobs) and math.isnan(stats.entropy)
    assert experience.values.isfinite().all() and experience.values.abs().sum() > 0


def test_values_of_a_shared_critic_are_the_same_with_and_without_old_log_probabilities() -> None:
    found = []
    for block in (None, {"bypass_mode": True}):
        policy = tiny_policy(critic="shared")
        for parameter in policy.critic.parameters():  # type: ignore[union-attr]
            torch.nn.init.constant_(parameter, 0.1)  # its head begins at 0
        _, recorder, _ = run(block, policy=policy, iterations=1)
        found.append(recorder.of("on_experience_ready")[0][0].values)
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)


def test_the_bypass_ratio_is_current_over_engine() -> None:
    _, recorder, metrics = run({"bypass_mode": True, "full_every": 1}, iterations=1)
    first = recorder.of("on_before_step")[0]
    assert first.ratio_max > 1.2, "before any step it is the gap between trainer and engine"
    assert metrics["rollout_corr/k3_kl"] > 0.01


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_rejection_follows_the_policy_and_keeps_the_denominator(loss_type: str) -> None:
    block: dict[str, Any] = {"bypass_mode": True, "loss_type": loss_type, "rollout_rs": "token"}
    block |= {"rollout_rs_threshold": 1.3}
    if loss_type == "reinforce":
        block |= {"rollout_is": "token", "rollout_is_threshold": 1.2}
    module, recorder, metrics = run(block, iterations=1)
    [(experience, _)] = recorder.of("on_experience_ready")
    assert torch.equal(experience.loss_mask, experience.response_mask), "nothing is rejected before the update"
    assert 0 < metrics["rollout_corr/accepted_fraction"] < 1
    module._correction.begin(2)
    generator = torch.Generator().manual_seed(0)
    current = experience.rollout_logprobs + 0.4 * torch.randn(experience.rollout_logprobs.shape, generator=generator)
    current.requires_grad_()
    gap = (current - experience.rollout_logprobs).detach()
    keep = experience.response_mask & (gap.abs() <= math.log(1.3))
    batch = whole(experience)
    found = module.policy_loss(batch, current).loss
    if loss_type == "ppo_clip":
        accepted = ppo_policy_loss(current, experience.rollout_logprobs, experience.advantages, keep).loss
        by_hand = accepted * keep.sum() / experience.response_mask.sum()
    else:
        by_hand = -(gap.exp().clamp(max=1.2) * experience.advantages * current)[keep].sum()
        by_hand = by_hand / experience.response_mask.sum()
    torch.testing.assert_close(found, by_hand)
    found.backward()
    assert (current.grad[~keep] == 0).all() and current.grad[keep].abs().sum() > 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    "block",
    [
        {"bypass_mode": True, "rollout_rs": "token", "rollout_rs_threshold": 1.2},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": "geometric",
         "rollout_rs_threshold": 1.2},
        {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token", "rollout_rs_threshold": 1.3},
    ],
    ids=["bypass", "reinforce", "decoupled"],
)  # fmt: skip
def test_gradients_do_not_depend_on_the_split_into_micro_batches(block: dict[str, Any], mode: str) -> None:
    recorder = Recorder()
    module = corrected(block, iterations=1, loss={"aggregation": mode}, policy=tiny_policy(critic="none"), kl={
        "coefficient": 0.0}, advantage={"estimator": "reinforce_plus_plus"})  # fmt: skip
    fit(module, [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    module._correction.begin(2)
    batch, found = whole(experience, mode), []
    for parts in ([batch], [part for _, part in split_by_tokens(batch, batch.lengths(), 1)]):
        module.zero_grad()
        for part in parts:
            module.micro_batch_loss(part, MetricBatch()).backward()
        found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        scale = max(float(gradient.abs().max()), 1e-6)
        assert (found[1][name] - gradient).abs().max() <= 1e-5 * scale, name


# --- engines ---------------------------------------------------------------------------------------------------------


def test_an_engine_without_log_probabilities_is_refused_at_start() -> None:
    class Silent(HFEngine):
        reports_logprobs = False

    def build(block: dict[str, Any] | None) -> PPOModule:
        donor = tiny_module()
        return PPOModule(tiny_policy(), Silent(), donor.reward, iterations=1, rollout_correction=block)

    build(None)
    with pytest.raises(SettingError, match="Silent, which reports no log-probabilities"):
        build({})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_raw_log_probabilities_of_tempered_samples_are_refused(temperature: float) -> None:
    """At temperature 1 raw and processed are the same."""

    class Raw(HFEngine):
        def describe(self) -> dict[str, Any]:
            return super().describe() | {"logprobs_mode": "raw_logprobs"}

    module = tiny_module(iterations=1, rollout_correction={"rollout_is": "token"})
    module.engine = Raw(samples=2, max_new_tokens=6, temperature=temperature)
    if temperature == 1.0:
        fit(module)
    else:
        with pytest.raises(SettingError, match=r"rollout.logprobs_mode = 'raw_logprobs' is not allowed: processed"):
            fit(module)


@pytest.mark.parametrize(("block", "warned"), [({"rollout_is": "token"}, True), ({}, False)])
def test_truncated_sampling_with_correction_is_warned_about(block: dict[str, Any], warned: bool) -> None:
    """Never a silent bias."""
    module = tiny_module(iterations=1, rollout_correction=block)
    module.engine = HFEngine(samples=2, max_new_tokens=6, top_k=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module)
    said = [str(w.message) for w in caught if "cut the distribution" in str(w.message)]
    assert bool(said) == warned and all("rollout.top_k = 2" in text for text in said)


# --- tiers of metrics ------------------------------------------------------------------------------------------------


class Kept(DummyLogger):
    """Keeps what is logged, iteration by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if "clock/iteration" in metrics:
            self.seen.append(dict(metrics))


def logged(block: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    """The metrics of every iteration."""
    logger = Kept()
    fit(corrected(block, iterations=4, **options), logger=logger)
    return logger.seen


@pytest.mark.parametrize("bypass", [False, True])
def test_the_full_set_comes_every_few_iterations(bypass: bool) -> None:
    seen = logged({"full_every": 3, "chi2_trigger": None, "bypass_mode": bypass, "rollout_rs": "token",
                   "rollout_rs_threshold": 9.0})  # fmt: skip
    assert ["rollout_corr/rollout_rs_max" in numbers for numbers in seen] == [True, False, False, True]
    assert all("rollout_corr/chi2_token" in numbers for numbers in seen)


@pytest.mark.parametrize("bypass", [False, True])
def test_chi_square_triggers_the_full_set(bypass: bool) -> None:
    """At once; in bypass mode, where chi-square is known only after the update, in the next iteration."""
    block = {"full_every": 100, "bypass_mode": bypass, "rollout_rs": "token", "rollout_rs_threshold": 9.0}
    always = logged({**block, "chi2_trigger": 1e-9}, noise=1.0)
    never = logged({**block, "chi2_trigger": 1e9}, noise=1.0)
    assert [n["rollout_corr/chi2_token"] > 1e-9 for n in always] == [True] * 4
    assert ["rollout_corr/rollout_rs_max" in n for n in never] == [True, False, False, False]
    full = ["rollout_corr/rollout_rs_max" in n for n in always]
    assert full == ([True, False, True, False] if bypass else [True] * 4)


# --- adaptive limits -------------------------------------------------------------------------------------------------

ADAPTIVE = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token",
    "rollout_rs_threshold": 1.5,
    "adaptive": {"target_ess": 0.97, "target_rejection": 0.05, "threshold_bounds": [1.05, 4.0], "step": 0.3},
}


def test_limits_move_towards_their_targets_within_bounds_and_are_logged() -> None:
    seen = logged(ADAPTIVE, noise=0.6)
    caps, scales = ([n[f"knob/{name}"] for n in seen] for name in ("importance_threshold", "rejection_scale"))
    assert caps[-1] < caps[0] < 2.0, "the effective sample size is below its target"
    assert scales[-1] > scales[0] > 1.0, "more is rejected than wanted"
    assert all(cap >= 1.05 for cap in caps) and all(scale <= 4.0 for scale in scales)
    rejected = [n["rollout_corr/rollout_rs_masked_fraction"] for n in seen]
    assert rejected[-1] < rejected[0]


def test_limits_stop_at_their_bounds_and_ignore_nan_and_absent_readings() -> None:
    module = corrected(ADAPTIVE)
    limits = module._correction.limits
    for _ in range(100):
        limits.observe(0.01, 1.0)
    assert (limits.cap, limits.scale) == (1.05, 4.0)
    for reading in (math.nan, math.inf, None):
        limits.observe(reading, reading)
    assert (limits.cap, limits.scale) == (1.05, 4.0)
    # No wind-up: the first reading on the other side moves them. The averages forget by a fifth per reading.
    for _ in range(40):
        limits.observe(1.0, 0.0)
    assert limits.cap > 1.05 and limits.scale < 4.0


def test_one_step_of_a_limit_is_by_the_formula() -> None:
    """ESS 0.5 against 0.97, no past: error (0.5 - 0.97) / 0.97, so the cap is 2 exp(0.3 * -0.4845)."""
    module = corrected(ADAPTIVE)
    module._correction.limits.observe(0.5, None)
    assert module.control.value("importance_threshold") == pytest.approx(2 * math.exp(0.3 * (0.5 - 0.97) / 0.97))
    module._correction.limits.observe(1.0, None)  # average 0.8 * 0.5 + 0.2 * 1 = 0.6
    expected = 2 * math.exp(0.3 * ((0.5 - 0.97) / 0.97 + (0.6 - 0.97) / 0.97))
    assert module.control.value("importance_threshold") == pytest.approx(expected)


@pytest.mark.parametrize("bypass", [False, True])
def test_a_resumed_run_has_the_adaptive_state(tmp_path: Path, bypass: bool) -> None:
    block: dict[str, Any] = {**ADAPTIVE, "full_every": 100}
    if bypass:
        block |= {"bypass_mode": True, "loss_type": "reinforce"}
    straight = corrected(block, iterations=4, noise=0.6)
    first = corrected(block, iterations=4, noise=0.6)
    fit(straight)
    checkpoint = IterationCheckpoint(dirpath=str(tmp_path), every_n_iterations=2, keep=None)
    fit(first, [checkpoint], data=prompts(first, iterations=4), enable_checkpointing=True)
    again = corrected(block, iterations=4, noise=0.6)
    fit(again, resume=tmp_path / "iteration_000002.ckpt")
    assert again.control.iteration == 4
    assert same(weights(again), weights(straight))
    for name in ("importance_threshold", "rejection_scale"):
        assert again.control.value(name) == straight.control.value(name) > 0
    assert again._correction.state_dict() == straight._correction.state_dict()


def test_a_checkpoint_without_correction_starts_its_averages_afresh(tmp_path: Path) -> None:
    first = corrected(None, iterations=2)
    checkpoint = IterationCheckpoint(dirpath=str(tmp_path), every_n_iterations=1, keep=None)
    fit(first, [checkpoint], enable_checkpointing=True)
    again = corrected(ADAPTIVE, iterations=2)
    fit(again, resume=tmp_path / "iteration_000001.ckpt")
    assert again.control.iteration == 2


def test_a_callback_may_scale_the_cap_for_an_iteration() -> None:
    class Guard(RLHFCallback):
        def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
            module.control.scale("importance_threshold", 0.5, by="guard")

    recorder = Recorder()
    module = corrected({"rollout_is": "token", "rollout_is_threshold": 2.2}, iterations=1)
    fit(module, [Guard(), recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    assert experience.is_weights.max() == pytest.approx(1.1)


# --- settings --------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"rollout_is": "tokens"}, "rollout_is", "token, sequence, geometric, null"),
    ({"rollout_is": True}, "rollout_is", "one of token"),
    ({"rollout_is_threshold": 0}, "rollout_is_threshold", "> 0"),
    ({"rollout_is_threshold": -1.0}, "rollout_is_threshold", "> 0"),
    ({"rollout_is_threshold": math.nan}, "rollout_is_threshold", "> 0"),
    ({"rollout_is_threshold": None}, "rollout_is_threshold", "> 0"),
    ({"rollout_is_mode": "clip"}, "rollout_is_mode", "truncate, mask"),
    ({"rollout_is_threshold_lower": 0.5}, "rollout_is_threshold_lower", "no lower cap"),
    ({"rollout_is_mode": "mask", "rollout_is_threshold_lower": 3.0}, "rollout_is_threshold_lower", "at most"),
    ({"rollout_is_mode": "mask", "rollout_is_threshold": 0.5}, "rollout_is_threshold", "at most"),
    ({"rollout_is_batch_normalize": "yes"}, "rollout_is_batch_normalize", "true or false"),
    ({"rollout_is_dtype": "int8"}, "rollout_is_dtype", "float32, float16"),
    ({"rollout_is_dtype": "bfloat16", "rollout_is": "token"}, "rollout_is_dtype", "may change a weight"),
    ({"rollout_is_dtype": "float16", "rollout_is_threshold": 4.1}, "rollout_is_dtype", "up to a threshold of 4"),
    ({"rollout_is_dtype": "float16", "rollout_is": "token", "adaptive": {"target_ess": 0.9}}, "rollout_is_dtype",
     "weight of up to 10"),
    ({"rollout_rs": "token"}, "rollout_rs_threshold", "needs one"),
    ({"rollout_rs": "tokens", "rollout_rs_threshold": 2.0}, "rollout_rs", "did you mean"),
    ({"rollout_rs": "token", "rollout_rs_threshold": 0}, "rollout_rs_threshold", "> 0"),
    ({"rollout_rs": "token", "rollout_rs_threshold": "3_2"}, "rollout_rs_threshold", "at most 2"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "rollout_rs_threshold", "where nothing lies"),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": 0.5, "rollout_rs_threshold_lower": 0.1},
     "rollout_rs_threshold_lower", "upper bound alone"),
    ({"rollout_token_veto_threshold": 1.5}, "rollout_token_veto_threshold", "between 0 and 1"),
    ({"missing_logprobs": "drop"}, "missing_logprobs", "neutral, reject"),
    ({"loss_type": "reinforce"}, "loss_type", "bypass_mode: true"),
    ({"loss_type": "gspo"}, "loss_type", "ppo_clip, reinforce"),
    ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is", "count the gap twice"),
    ({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
     "rollout_is_batch_normalize", "depend on the cut"),
    ({"full_every": 0}, "full_every", ">= 1"),
    ({"full_every": 1.5}, "full_every", ">= 1"),
    ({"chi2_trigger": 0}, "chi2_trigger", "> 0"),
    ({"rollout_iss": "token"}, "rollout_iss", "did you mean 'rollout_is'"),
    ({"adaptive": {"target": 0.9}}, "adaptive.target", "did you mean"),
    ({"adaptive": {"target_ess": 1.0}, "rollout_is": "token"}, "adaptive.target_ess", "between 0 and 1"),
    ({"adaptive": {"target_ess": 0.9}}, "adaptive.target_ess", "without rollout_is"),
    ({"adaptive": {"target_rejection": 0.1}}, "adaptive.target_rejection", "without rollout_rs"),
    ({"adaptive": {"step": 0}}, "adaptive.step", r"\(0, 1\]"),
    ({"adaptive": {"smoothing": 1.0}}, "adaptive.smoothing", r"\[0, 1\)"),
    ({"adaptive": {"threshold_bounds": [2.0]}}, "adaptive.threshold_bounds", "two numbers"),
    ({"adaptive": {"threshold_bounds": [3.0, 2.0]}}, "adaptive.threshold_bounds", "lowest first"),
    ({"adaptive": {"target_ess": 0.9}, "rollout_is": "token", "rollout_is_threshold": 20.0}, "rollout_is_threshold",
     "where it starts"),
    ({"adaptive": {"target_rejection": 0.1, "scale_bounds": [2.0, 3.0]}, "rollout_rs": "token",
      "rollout_rs_threshold": 2.0}, "adaptive.scale_bounds", "around 1"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "key", "said"), BAD)
def test_bad_settings_are_refused_by_key(block: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        tiny_module(rollout_correction=block)
    assert caught.value.key == f"module.rollout_correction.{key}"


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rollout_is": ({}, {"rollout_is": "sequence"}),
    "rollout_is_threshold": ({"rollout_is": "token"}, {"rollout_is_threshold": 1.1}),
    "rollout_is_mode": ({"rollout_is": "token", "rollout_is_threshold": 1.2}, {"rollout_is_mode": "mask"}),
    "rollout_is_threshold_lower": (
        {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_threshold": 1.2},
        {"rollout_is_threshold_lower": 0.3},
    ),
    "rollout_is_batch_normalize": ({"rollout_is": "token"}, {"rollout_is_batch_normalize": True}),
    "rollout_is_dtype": ({"rollout_is": "token"}, {"rollout_is_dtype": "float16"}),
    "rollout_rs": ({}, {"rollout_rs": "token", "rollout_rs_threshold": 1.2}),
    "rollout_rs_threshold": ({"rollout_rs": "token", "rollout_rs_threshold": 1.2}, {"rollout_rs_threshold": 1.5}),
    "rollout_rs_threshold_lower": (
        {"rollout_rs": "token", "rollout_rs_threshold": 1.2},
        {"rollout_rs_threshold_lower": 0.5},
    ),
    "rollout_token_veto_threshold": ({}, {"rollout_token_veto_threshold": 0.7}),
    "missing_logprobs": ({}, {"missing_logprobs": "reject"}),
    "bypass_mode": ({}, {"bypass_mode": True}),
    "loss_type": ({"bypass_mode": True}, {"loss_type": "reinforce"}),
    "full_every": ({"chi2_trigger": None}, {"full_every": 1}),
    "chi2_trigger": ({}, {"chi2_trigger": 1e-9}),
    "adaptive": ({}, {}),  # its own keys below
    "adaptive.target_ess": ({"rollout_is": "token"}, {"adaptive": {"target_ess": 0.99}}),
    "adaptive.target_rejection": (
        {"rollout_rs": "token", "rollout_rs_threshold": 1.2},
        {"adaptive": {"target_rejection": 0.1}},
    ),
    **{
        f"adaptive.{name}": (
            {**ADAPTIVE, "adaptive": {"target_ess": 0.97, "target_rejection": 0.05}},
            {"adaptive": {"target_ess": 0.97, "target_rejection": 0.05, name: value}},
        )
        for name, value in {
            "step": 0.01,
            "smoothing": 0.1,
            "threshold_bounds": [1.999, 2.001],
            "scale_bounds": [0.99, 1.01],
        }.items()
    },
}
"""For every key a block, and a change of it that changes weights or metrics."""


def test_the_table_above_has_every_key() -> None:
    keys = {field.name for field in fields(RolloutCorrectionSettings)}
    keys |= {f"adaptive.{field.name}" for field in fields(AdaptiveSettings)}
    assert set(CHANGES) == keys


@functools.cache
def outcome(block: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after two iterations with a block, given as JSON."""
    module, _, metrics = run(json.loads(block), broken=((1, 0),), iterations=2)
    stable = {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/", "tok/s"))}
    return weights(module), stable


@pytest.mark.parametrize("key", [key for key in CHANGES if key != "adaptive"])
def test_every_key_changes_something(key: str) -> None:
    before, change = CHANGES[key]
    (weights_before, metrics_before), (weights_after, metrics_after) = (
        outcome(json.dumps(block)) for block in (before, {**before, **change})
    )
    assert not same(weights_before, weights_after) or metrics_before != metrics_after
