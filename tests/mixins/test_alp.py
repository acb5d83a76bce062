"""Adaptive layerwise perturbation in real runs: where the noise is, what the ratio is, how sigma is learned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.experience import Experience, MiniBatch
from lightning_rlhf.functional.losses import LossScale, ppo_policy_loss
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.settings import SettingError
from tests.support import Recorder, fit, prompts, same, tiny_module, tiny_policy, weights

FREE = {"warmup_steps": 0, "init_sigma": 0.05}
"""Sigma learns from the first step on."""


def alp_module(alp: dict[str, Any] | None, **changes: Any) -> Any:
    return tiny_module(alp=alp, iterations=changes.pop("iterations", 2), **changes)


def minibatch(experience: Experience) -> MiniBatch:
    counts = experience.require("loss_mask").sum(-1)
    rows = torch.arange(len(experience))
    scale = LossScale(tokens=float(counts.sum()), sequences=float((counts > 0).sum()))
    return MiniBatch.from_experience(experience, rows, scale)


@pytest.fixture(scope="module")
def scored() -> Any:
    """Experience whose old and engine log-probabilities differ from the policy's and from each other."""
    recorder = Recorder()
    fit(tiny_module(iterations=1, actor={"lr": 1e-12}), [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    generator = torch.Generator().manual_seed(0)
    for name in ("old_logprobs", "rollout_logprobs"):
        noise = torch.randn(experience.old_logprobs.shape, generator=generator)
        setattr(experience, name, experience.old_logprobs + 0.2 * noise)
    return experience


# --- sigma 0, and silence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_sigma_0_gives_the_same_weights_bit_for_bit(kind: str, ratio_level: str) -> None:
    runs = []
    for alp in (None, {"ratio": "decoupled", "init_sigma": 0.0, "warmup_steps": 0, "compare_every": 1}):
        module = alp_module(alp, policy=tiny_policy(critic=kind), loss={"ratio_level": ratio_level})
        recorder = Recorder()
        fit(module, [recorder])
        trained = weights(module)
        trained.pop("perturbation.log_sigma", None)
        runs.append((trained, [s.policy_loss for s in recorder.of("on_before_step")]))
    assert same(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_sigma_0_gives_the_same_loss_and_gradients_bit_for_bit(scored: Any) -> None:
    results = []
    for alp in (None, {"ratio": "decoupled", "init_sigma": 0.0}):
        module = alp_module(alp)
        loss = module.micro_batch_loss(minibatch(scored), MetricBatch())
        loss.backward()
        results.append(
            {"loss": loss.detach()} | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        )
    assert results[1].pop("perturbation.log_sigma").eq(0).all()
    assert same(results[0], results[1])


def test_without_a_block_nothing_is_added() -> None:
    module = alp_module(None)
    assert not any("perturbation" in name for name in module.state_dict())
    assert [group["name"] for group in module.parameter_groups()] == ["actor", "critic"]
    trainer = fit(module)
    assert not any(name.startswith("alp/") for name in trainer.callback_metrics)


# --- the noise reaches the update's forward pass alone -----------------------------------------------------------


def test_every_pass_but_the_updates_is_that_of_the_plain_model() -> None:
    """Old, reference, engine and evaluation log-probabilities, all in training mode, against a model without noise."""
    recorder = Recorder()
    module = alp_module(FREE | {"init_sigma": 0.1}, iterations=1, actor={"lr": 1e-12})
    assert module.actor.training
    fit(module, [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    ids, mask = experience.concatenated()
    plain = tiny_policy().actor.train()
    expected = plain(ids, mask, experience.response_ids.shape[1]).logprobs.masked_fill(~experience.response_mask, 0.0)
    assert torch.equal(experience.old_logprobs, expected.detach())
    assert torch.equal(experience.ref_logprobs, expected.detach())
    assert (experience.rollout_logprobs - expected).abs().max() < 1e-5
    first = recorder.of("on_before_step")[0]
    assert abs(first.ratio_max - 1) > 1e-3, "the update's pass is perturbed"


def test_held_out_answers_are_those_of_the_plain_model() -> None:
    answers = []
    for alp in (None, FREE | {"init_sigma": 0.1}):
        module = alp_module(alp)
        module.engine.setup(module.actor.lm, module.tokenizer)
        module.engine.update_weights(0)
        data = prompts(module)
        data.setup("fit")
        answers.append(module.engine.generate(data.train_batch(0), samples=1, max_new_tokens=6, seed=1, greedy=True))
    assert torch.equal(answers[0].response_ids, answers[1].response_ids)
    assert torch.equal(answers[0].rollout_logprobs, answers[1].rollout_logprobs)


def test_the_engine_gets_exactly_the_names_of_the_model() -> None:
    plain, module = alp_module(None), alp_module(FREE)
    assert set(module.actor.export_state_dict()) == set(plain.actor.lm.state_dict())
    assert set(module.actor.lm.state_dict()) == set(plain.actor.lm.state_dict())


def test_a_tolerance_for_the_first_ratio() -> None:
    """Under noise the first ratio is 1 up to the noise: with the default sigma it is close, and it grows with sigma."""
    gaps = []
    for sigma in (1e-4, 1e-2):
        recorder = Recorder()
        fit(alp_module({"init_sigma": sigma}, iterations=1), [recorder])
        gaps.append(abs(recorder.of("on_before_step")[0].ratio_max - 1))
    assert gaps[0] < 2e-2 and gaps[1] > 3 * gaps[0]


# --- the ratio ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize(("ratio", "denominator"), [("unified", "rollout_logprobs"), ("decoupled", "old_logprobs")])
def test_the_denominator_of_the_ratio(scored: Any, ratio: str, denominator: str, ratio_level: str) -> None:
    module = alp_module({"ratio": ratio}, loss={"ratio_level": ratio_level})
    batch = minibatch(scored)
    logprobs = scored.old_logprobs + 0.1
    found = module.policy_loss(batch, logprobs)
    expected = ppo_policy_loss(
        logprobs, getattr(scored, denominator), scored.advantages, scored.loss_mask, ratio_level=ratio_level
    )
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.ratio, expected.ratio)


def test_unified_drops_tokens_without_an_engine_probability(scored: Any) -> None:
    module = alp_module({"ratio": "unified"})
    experience: Any = MiniBatch.from_experience(scored, torch.arange(len(scored)), LossScale(tokens=1.0, sequences=1.0))
    experience.rollout_logprobs = scored.rollout_logprobs.clone()
    experience.rollout_logprobs[0, 0] = math.nan
    module.prepare_experience(experience)
    assert experience.loss_mask is not None and not experience.loss_mask[0, 0]
    assert experience.loss_mask.sum() == scored.loss_mask.sum() - 1
    module.micro_batch_loss(experience, MetricBatch()).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_unified_with_weights_on_top_is_refused() -> None:
    module = alp_module({"ratio": "unified"}, rollout_correction={"rollout_is": "token"})
    with pytest.raises(SettingError, match=r"module\.alp\.ratio = 'unified' is not allowed: decoupled where"):
        fit(module)
    fit(alp_module({"ratio": "decoupled"}, rollout_correction={"rollout_is": "token"}, iterations=1))
    rejection = {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0}
    fit(alp_module({"ratio": "unified"}, rollout_correction=rejection, iterations=1))


def test_unified_with_log_probabilities_of_another_distribution_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = alp_module({"ratio": "unified"}, temperature=0.7)
    describe = module.engine.describe
    monkeypatch.setattr(module.engine, "describe", lambda: describe() | {"logprobs_mode": "raw_logprobs"})
    with pytest.raises(SettingError, match=r"rollout\.logprobs_mode = 'raw_logprobs' is .* with module\.alp"):
        fit(module)


def test_unified_with_weights_is_refused_before_anything_runs(compose) -> None:
    from lightning_rlhf import schema

    with pytest.raises(schema.ConfigError, match=r"rollout_is = 'token'\n    null with module\.alp\.ratio = unified"):
        schema.check(compose("alp=default", "rollout_correction=token_tis"))
    assert (
        schema.check(compose("alp=decoupled", "rollout_correction=token_tis"))["module"]["alp"]["ratio"] == "decoupled"
    )


# --- the gradient of sigma, cut, schedule ------------------------------------------------------------------------


def test_sigma_has_a_gradient_and_learns() -> None:
    module = alp_module(FREE | {"lr": 0.05})
    start = module.perturbation.log_sigma.detach().clone()
    recorder = Recorder()
    fit(module, [recorder])
    assert all(stats.grad_norms["alp"] > 0 for stats in recorder.of("on_before_step"))
    assert (module.perturbation.log_sigma != start).all()


def test_sigma_is_frozen_during_warmup_and_then_has_its_own_rate() -> None:
    """8 optimiser steps, sigma is free from the 6th on."""
    seen: list[tuple[int, float, Tensor]] = []

    class Watch(RLHFCallback):
        def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
            [group] = [g for g in module.optimizers().param_groups if g["name"] == "alp"]
            seen.append((module.control.update, group["lr"], module.perturbation.log_sigma.detach().clone()))

    module = alp_module({"warmup_steps": 5, "init_sigma": 1e-3, "lr": 0.02, "kl_limit": 1e9},
                        optimizer={"schedule": "constant"})  # fmt: skip
    start = module.perturbation.log_sigma.detach().clone()
    fit(module, [Watch()])
    assert [update for update, *_ in seen] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [rate for _, rate, _ in seen] == [0.0] * 5 + [0.02] * 3
    assert all(torch.equal(sigma, start) for _, _, sigma in seen[:5])
    assert not torch.equal(seen[5][2], start)


def test_the_rate_shrinks_while_kl_is_high_and_recovers() -> None:
    module = alp_module({"warmup_steps": 0, "kl_limit": 0.01, "step": 0.5, "smoothing": 0.0, "min_lr_factor": 0.3})
    schedule = module._alp.schedule
    factors = []
    for kl in (0.02, math.nan, 0.02, 0.02, 0.02, math.nan, 0.001, math.nan, 0.001, 0.001, 0.001):
        schedule.on_minibatch_end(None, module, stats(kl=kl))
        factors.append(round(schedule.lr_factor, 4))
    assert factors == [0.6667, 0.6667, 0.4444, 0.3, 0.3, 0.3, 0.45, 0.45, 0.675, 1.0, 1.0]


def test_the_clip_norm_rises_while_the_gradient_varies_and_returns() -> None:
    module = alp_module({"clip_norm": 1.0, "max_clip_norm": 2.0, "step": 0.5, "smoothing": 0.5, "variance_limit": 0.5})
    schedule = module._alp.schedule
    limits = []
    for norm in (1.0, 1.0, 21.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        schedule.on_minibatch_end(None, module, stats(norm=norm))
        limits.append(schedule.clip_norm)
    # k steps after the spike: mean 1 + 10 / 2^k, mean square 1 + 220 / 2^k; variance / mean^2 < 0.5 from k = 9 on.
    assert limits == [1.0, 1.0, 1.5, *[2.0] * 8, 2.0 / 1.5, 1.0]
    [group] = [g for g in module.parameter_groups() if g["name"] == "alp"]
    assert group["clip_norm"] == schedule.clip_norm


def stats(kl: float = 0.0, norm: float = 1.0) -> Any:
    from lightning_rlhf.events import MinibatchStats

    return MinibatchStats(1, 1, 0, 0, 1.0, 0.0, 0.0, kl, 0.0, 0.0, 1.0, grad_norms={"alp": norm}, stepped=True)


def test_sigma_stays_in_its_bounds() -> None:
    module = alp_module(FREE | {"lr": 5.0, "sigma_bounds": [0.04, 0.06], "kl_limit": 1e9})
    fit(module)
    sigma = module.perturbation.sigmas()
    assert ((sigma >= 0.04 * 0.9999) & (sigma <= 0.06 * 1.0001)).all()
    assert (sigma != 0.05).any()


# --- state -------------------------------------------------------------------------------------------------------


def run(folder: Path, resume: Path | None = None) -> Any:
    module = alp_module(FREE | {"granularity": "channel", "lr": 0.01, "kl_limit": 1e-4}, iterations=4)
    callbacks = [RNGState(), IterationCheckpoint(str(folder), every_n_iterations=2, keep=None)]
    fit(module, callbacks, folder=folder, resume=resume, enable_checkpointing=True)
    return module


def test_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path)
    resumed = run(tmp_path / "again", resume=tmp_path / "iteration_000002.ckpt")
    assert same(weights(whole), weights(resumed)) and "perturbation.log_sigma" in weights(whole)
    assert whole._alp.schedule.state_dict() == resumed._alp.schedule.state_dict()
    assert whole._alp.schedule.lr_factor < 1, "the check would see a schedule that starts afresh"


def test_a_trainer_has_the_schedule_once_whatever_it_does() -> None:
    module = alp_module(FREE, iterations=1)
    trainer: Any = fit(module)
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    assert sum(callback is module._alp.schedule for callback in trainer.callbacks) == 1


def test_checkpoints_hold_sigma_and_its_difference_between_ranks(tmp_path: Path) -> None:
    run(tmp_path)
    saved = torch.load(tmp_path / "iteration_000002.ckpt", weights_only=True)
    assert saved["state_dict"]["perturbation.log_sigma"].shape == (2, 32)
    assert saved["lightning_rlhf"]["alp"] == {"sigma_difference": 0.0}


def test_a_difference_between_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock stands for a second rank, whose sigma of layer 1 is larger by 0.25."""
    module = alp_module(FREE)
    other = module.perturbation.log_sigma.detach().double() + torch.tensor([0.0, 0.25])
    calls = iter([other, -other])
    monkeypatch.setattr("lightning_rlhf.mixins.alp.all_reduce_max", lambda x: torch.maximum(x, next(calls)))
    assert module.sigma_difference() == pytest.approx(0.25)


# --- metrics and comparison --------------------------------------------------------------------------------------


def test_metrics_of_an_iteration() -> None:
    module = alp_module(FREE | {"compare_every": 2}, iterations=3)
    every: list[dict[str, float]] = []

    class Keep(RLHFCallback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            every.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    fit(module, [Keep()])
    names = {"alp/sigma_layer_00", "alp/sigma_layer_01", "alp/lr_factor", "alp/clip_norm", "lr/alp", "grad_norm/alp"}
    assert names <= every[0].keys()
    assert 0 < every[0]["alp/kl_perturbed"] < 1
    assert every[0]["alp/correlation_perturbed"] < every[0]["alp/correlation_plain"] <= 1 + 1e-9
    assert every[2]["alp/kl_perturbed"] != every[0]["alp/kl_perturbed"]
    assert "alp/kl_perturbed" not in every[1], "nothing was compared, and the value of before is not today's"
    tails = module.ratio_tails
    assert tails and all(t.perturbed[0] <= t.perturbed[1] and t.plain[0] <= t.plain[1] for t in tails)


def test_comparing_changes_no_weight() -> None:
    runs = []
    for every in (1, 100):
        module = alp_module(FREE | {"compare_every": every})
        fit(module)
        runs.append(weights(module))
    assert same(*runs)


def test_a_comparison_by_hand() -> None:
    from lightning_rlhf.mixins.alp_comparison import PolicyComparison

    rollout = torch.tensor([[0.15, 0.35, 0.75, 0.9]]).log()
    plain, perturbed = rollout + torch.tensor([[0.0, 0.1, -0.1, 0.0]]), rollout + 0.2
    batch = MiniBatch(**dict.fromkeys(
        ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "finish", "policy_version", "seed", "group"),
        torch.zeros(1),
    ), prompt_key=[""], rollout_logprobs=rollout, loss_mask=torch.tensor([[True, True, True, False]]))  # fmt: skip
    comparison = PolicyComparison()
    comparison.add(batch, perturbed, plain)
    numbers = comparison.metrics()
    # log(perturbed / plain) = 0.2, 0.1, 0.3: k3 = r - 1 - log r.
    k3 = [math.exp(x) - 1 - x for x in (0.2, 0.1, 0.3)]
    assert numbers["alp/kl_perturbed"] == pytest.approx(sum(k3) / 3, rel=1e-5)
    assert numbers["alp/correlation_perturbed"] == pytest.approx(1.0)
    pair = torch.stack([plain[0, :3].exp(), rollout[0, :3].exp()]).double()
    assert numbers["alp/correlation_plain"] == pytest.approx(float(torch.corrcoef(pair)[0, 1]), rel=1e-5)
    assert [(t.low, t.tokens, t.plain) for t in comparison.tails()] == [
        (0.1, 1, pytest.approx((0.0, 0.0), abs=1e-6)),
        (0.3, 1, pytest.approx((0.1, 0.1), abs=1e-6)),
        (0.7, 1, pytest.approx((-0.1, -0.1), abs=1e-6)),
    ]


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ratio": "both"}, "alp.ratio = 'both' is not allowed: one of unified, decoupled"),
        ({"granularity": "token"}, "alp.granularity = 'token'"),
        ({"init_sigma": 1.0}, r"alp.init_sigma = 1.0 is not allowed: 0, or a number in sigma_bounds = \[1e-06, 0.1\]"),
        ({"sigma_bounds": [1, 0.1]}, "alp.sigma_bounds"),
        ({"layer_range": [1]}, "alp.layer_range"),
        ({"warmup_steps": -1}, "alp.warmup_steps = -1 is not allowed: a whole number >= 0"),
        ({"compare_every": 0}, "alp.compare_every"),
        ({"lr": 0}, "alp.lr = 0 is not allowed"),
        ({"clip_norm": 20.0}, "alp.max_clip_norm = 0.01 is not allowed: at least clip_norm = 20.0"),
        ({"smoothing": 1.0}, "alp.smoothing"),
        ({"min_lr_factor": 2}, "alp.min_lr_factor"),
        ({"quantise_bits": 3}, "alp.quantise_bits = 3 is not allowed: 8, 4 or null"),
        ({"layers": 3}, "alp.layers = 3"),
        ({"router": {"balance": -1}}, "alp.router.balance = -1"),
        ({"router": {"target": 0}}, "alp.router.target = 0"),
        ({"sigma": 1}, "alp.sigma = 1 is not allowed"),
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        alp_module(wrong)


def test_low_precision_that_swallows_the_noise_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="mostly rounded away"):
        fit(alp_module({}, iterations=1), precision="bf16-true")


def test_bf16_mixed_keeps_the_noise() -> None:
    recorder = Recorder()
    fit(alp_module(FREE | {"init_sigma": 1e-4}, iterations=1), [recorder], precision="bf16-mixed")
    assert all(stats.finite and stats.grad_norms["alp"] > 0 for stats in recorder.of("on_before_step"))


# --- export ------------------------------------------------------------------------------------------------------


def test_export_writes_sigma_for_inference_beside_the_plain_weights(compose, tiny_run: list[str], tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from lightning_rlhf.export import export_checkpoint
    from lightning_rlhf.models.fixed_perturbation import apply_perturbation
    from lightning_rlhf.schema import InputError
    from lightning_rlhf.train import train

    # 0.01 of a largest sigma 0.01 lies on the 8-bit grid: 0.7 of it are left.
    small = ["logger=none", "model.source.hidden_size=32", "model.source.layers=2", "model.source.heads=2"]
    noise = ["alp=int8", "module.alp.init_sigma=0.01"]
    train(compose(*tiny_run, *small, *noise))
    plain = export_checkpoint(str(tmp_path), str(tmp_path / "plain"))
    assert not (plain / "perturbation.safetensors").exists()
    folder = export_checkpoint(str(tmp_path), str(tmp_path / "noisy"), perturbation=True)
    weights_of = [load_file(path / "model.safetensors") for path in (plain, folder)]
    assert same(*weights_of) and not any("sigma" in name for name in weights_of[0])
    torch.testing.assert_close(load_file(folder / "perturbation.safetensors")["sigma"], torch.full((2,), 0.007))
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        before = lm(ids).logits
        fixed = apply_perturbation(lm, folder)
        first, second = lm(ids).logits, lm(ids).logits
        fixed.remove()
        assert torch.equal(lm(ids).logits, before)
    assert not torch.equal(first, before) and not torch.equal(first, second)
    with pytest.raises(ValueError, match="holds no perturbation"):
        apply_perturbation(lm, plain)
    with pytest.raises(InputError, match=r"trained without module\.alp"):
        saved = torch.load(tmp_path / "checkpoints" / "iteration_000001.ckpt", weights_only=True)
        del saved["lightning_rlhf"]["run_config"]["module"]["alp"]
        torch.save(saved, tmp_path / "other.ckpt")
        export_checkpoint(str(tmp_path / "other.ckpt"), str(tmp_path / "x"), perturbation=True)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (None, [[0.7, 0.07, 0.007]]),
        # Steps of 1 / 127 and of 1 / 7 of the largest.
        (8, [[0.7, 0.7 * 13 / 127, 0.7 * 1 / 127]]),
        (4, [[0.7, 0.7 * 1 / 7, 0.0]]),
    ],
)
def test_sigma_for_inference(bits: int | None, expected: list[list[float]]) -> None:
    from lightning_rlhf.models.fixed_perturbation import fixed_sigma

    torch.testing.assert_close(fixed_sigma(torch.tensor([[1.0, 0.1, 0.01]]).log(), bits), torch.tensor(expected))


# --- mixture of experts ------------------------------------------------------------------------------------------


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    from lightning_rlhf.models import LoadedModel, build_policy, build_tiny

    tokenizer = build_tiny("0123456789+-*= ", hidden_size=32, layers=1, heads=2, max_positions=64).tokenizer
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return build_policy(LoadedModel(MixtralForCausalLM(config), tokenizer, "tiny mixtral"), critic="none")


def test_a_run_of_a_mixture_of_experts() -> None:
    router = {"init_sigma": 1e-5, "balance": 0.5}
    module = alp_module(FREE | {"router": router}, policy=mixtral(), advantage={"estimator": "grpo"})
    before = module.router_perturbation.log_sigma.detach().clone()
    numbers = fit(module).callback_metrics
    assert numbers["alp/balance_loss"] > 0 and 0.25 < numbers["alp/utilisation_max"] < 0.26, "nearly even, not quite"
    assert numbers["alp/sigma_router_01"] > 0
    assert not torch.equal(module.router_perturbation.log_sigma, before)
    assert not torch.equal(module.router_perturbation.utilisation, torch.full((2, 4), 0.25))


def test_keys_of_the_router() -> None:
    """balance is the weight of the loss, target what it is zero at, init_sigma where sigma starts."""
    module = alp_module({"router": {"balance": 0.5, "target": 0.3, "init_sigma": 1e-3}}, policy=mixtral())
    router = module.router_perturbation
    assert router.target == 0.3 and torch.allclose(router.log_sigma.exp(), torch.tensor(1e-3))
    experience = Experience(**_one_row(), prompt_key=["a"], prompts=["a"], texts=["b"])
    batch = MiniBatch.from_experience(experience, torch.arange(1), LossScale(tokens=8.0, sequences=1.0))
    module.actor_logprobs(batch)
    shares = dict(router._shares)
    # 4 of the minibatch's 8 tokens are in this micro-batch.
    expected = 0.5 * 0.5 * sum(((share - 0.3) ** 2).sum() for share in shares.values())
    torch.testing.assert_close(module.extra_losses(batch)["alp/balance_loss"], expected)


def _one_row() -> dict[str, Tensor]:
    ids, mask = torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.bool)
    one = torch.zeros(1, dtype=torch.int64)
    fields = {"prompt_ids": ids, "prompt_mask": mask, "response_ids": ids, "response_mask": mask, "loss_mask": mask}
    return (
        fields
        | {"rollout_logprobs": -torch.ones(1, 4)}
        | dict.fromkeys(("finish", "policy_version", "seed", "group"), one)
    )
