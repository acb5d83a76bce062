"""The properties no change may break (docs/concepts.md), each on a real run in small."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.experience import Experience, MiniBatch, split_by_tokens
from lightning_rlhf.functional.losses import LossScale
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import RewardBatch
from lightning_rlhf.scoring import compute_advantages
from lightning_rlhf.settings import PPOSettings
from tests.support import Recorder, fit, prompts, same, tiny_module, tiny_policy, weights

POLICIES = {
    "separate": {"critic": "separate"},
    "shared": {"critic": "shared"},
    "lora": {"critic": "separate", "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
    "checkpointing": {"critic": "shared", "activation_checkpointing": True},
}


# --- 1. ratio one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_ratio_is_one(kind: str, temperature: float) -> None:
    recorder = Recorder()
    policy = tiny_policy(**POLICIES[kind])
    module = tiny_module(policy=policy, iterations=2, temperature=temperature, update={"minibatch_size": 5})
    modes = [m.training for m in module.modules()]
    fit(module, [recorder])
    first = [s for s in recorder.of("on_before_step") if s.epoch == 0 and s.minibatch == 0]
    assert [abs(s.ratio_max - 1.0) <= 1e-5 for s in first] == [True, True]
    assert all(s.kl_old <= 1e-9 for s in first)
    later = [s for s in recorder.of("on_before_step") if s.epoch == 1]
    assert max(abs(s.ratio_max - 1.0) for s in later) > 1e-4, "the check would see a policy that moved"
    assert [m.training for m in module.modules()] == modes


def test_engine_and_trainer_agree_after_every_update() -> None:
    """Log-probabilities of the engine are those of the weights it was just given."""
    recorder = Recorder()
    fit(tiny_module(iterations=3, temperature=0.8), [recorder])
    for experience, _ in recorder.of("on_experience_ready"):
        gap = (experience.old_logprobs - experience.rollout_logprobs)[experience.response_mask].abs().max()
        assert gap <= 1e-4
    versions = [e.policy_version.unique().tolist() for e, _ in recorder.of("on_experience_ready")]
    assert versions == [[0], [1], [2]], "the version is the number of iterations in the weights"


# --- 2. split invariance -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored() -> tuple[ActorCriticModule, Experience]:
    """A module with fresh experience of very different lengths, nothing trained on it yet."""
    recorder = Recorder()

    class Once(RLHFCallback):
        def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
            module.control.skip_step("only the experience is wanted")

    policy = tiny_policy(critic="separate")
    module = tiny_module(policy=policy, iterations=1, max_new_tokens=12, loss={"entropy_coefficient": 0.1})
    fit(module, [recorder, Once()])
    [(experience, _)] = recorder.of("on_experience_ready")
    # Old log-probabilities of another policy: ratios on both sides of the clip.
    noise = torch.randn(experience.old_logprobs.shape, generator=torch.Generator().manual_seed(0))
    experience.old_logprobs = experience.old_logprobs + 0.3 * noise
    return module, experience


def gradients(module: ActorCriticModule, experience: Experience, parts: list[MiniBatch]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    for part in parts:
        module.micro_batch_loss(part, MetricBatch()).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def minibatch(experience: Experience, mode: Any = "token-mean") -> MiniBatch:
    counts = experience.loss_mask.sum(-1)
    rows = torch.arange(len(experience))
    scale = LossScale(mode, tokens=float(counts.sum()), sequences=float((counts > 0).sum()), horizon=8)
    return MiniBatch.from_experience(experience, rows, scale)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("cut", ["one by one", "by tokens", "two uneven parts"])
def test_gradients_do_not_depend_on_the_split_into_micro_batches(
    scored: tuple[ActorCriticModule, Experience], mode: str, cut: str
) -> None:
    module, experience = scored
    whole = minibatch(experience, mode)
    expected = gradients(module, experience, [whole])
    if cut == "two uneven parts":
        parts = [whole.select(torch.tensor([0])).trim(), whole.select(torch.arange(1, len(whole))).trim()]
    else:
        budget = 1 if cut == "one by one" else 60
        parts = [part for _, part in split_by_tokens(whole, whole.lengths(), budget)]
    found = gradients(module, experience, parts)
    assert found.keys() == expected.keys() and len(parts) > 1
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 1e-5 * max(float(scale), 1e-6), name


def test_gradients_do_not_depend_on_padding(scored: tuple[ActorCriticModule, Experience]) -> None:
    module, experience = scored
    whole = minibatch(experience)
    expected = gradients(module, experience, [whole])
    padded = {}
    for name in ("prompt_ids", "prompt_mask"):
        value = getattr(whole, name)
        padded[name] = torch.cat([torch.zeros_like(value[:, :1]).expand(-1, 5), value], dim=1)
    for name in ("response_ids", "response_mask", "loss_mask", "old_logprobs", "ref_logprobs", "values", "advantages",
                 "returns", "rollout_logprobs", "entropy"):  # fmt: skip
        value = getattr(whole, name)
        # Values at padded positions must not matter, NaN included.
        filler = value.new_full((len(value), 1), math.nan if value.is_floating_point() else 0)
        padded[name] = torch.cat([value, filler.expand(-1, 7)], dim=1)
    found = gradients(module, experience, [dataclasses.replace(whole, **padded)])
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * max(float(gradient.abs().max()), 1e-6), name


def test_a_run_does_not_depend_on_the_token_budget() -> None:
    runs = []
    for budget in (40, 100_000):
        module = tiny_module(iterations=2, update={"micro_batch_tokens": budget, "score_tokens": budget})
        fit(module)
        runs.append(weights(module))
    for name, tensor in runs[0].items():
        torch.testing.assert_close(tensor, runs[1][name], rtol=1e-3, atol=1e-5)


# --- 3. global statistics, after rejection -----------------------------------------------------------------------


def test_rejected_rows_leave_whitening_means_and_denominators() -> None:
    class Reject(PPOModule):
        def prepare_experience(self, experience: Experience) -> None:
            experience.loss_mask = experience.response_mask.clone()
            experience.loss_mask[::2] = False

    recorder = Recorder()
    fit(tiny_module(cls=Reject, iterations=1), [recorder])
    [(experience, stats)] = recorder.of("on_experience_ready")
    kept = experience.advantages[experience.loss_mask]
    assert kept.mean().abs() < 1e-6 and kept.std() == pytest.approx(1.0, abs=1e-4)
    assert (experience.advantages[~experience.loss_mask] == 0).all()
    per_epoch = sum(s.tokens for s in recorder.of("on_before_step") if s.epoch == 0)
    assert per_epoch == experience.loss_mask.sum()
    assert stats.tokens == experience.response_mask.sum()


def test_a_rejected_last_token_does_not_lose_the_outcome() -> None:
    class RejectLast(PPOModule):
        def prepare_experience(self, experience: Experience) -> None:
            last = experience.response_lengths - 1
            mask = experience.response_mask.clone()
            experience.loss_mask = mask.scatter(1, last.unsqueeze(1), False)

    recorder = Recorder()
    blocks = {"advantage": {"gae_lambda": 1.0, "whiten": False}, "kl": {"coefficient": 0.0}}
    fit(tiny_module(cls=RejectLast, iterations=1, **blocks), [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    for row in range(len(experience)):
        assert experience.returns[row, 0] == pytest.approx(float(experience.scores[row]), abs=1e-5)


# --- 5. nothing is NaN -------------------------------------------------------------------------------------------


def test_a_batch_that_is_rejected_as_a_whole_changes_nothing() -> None:
    class RejectAll(PPOModule):
        def prepare_experience(self, experience: Experience) -> None:
            if self.control.iteration == 2:
                experience.loss_mask = torch.zeros_like(experience.response_mask)

    states: list[tuple[dict, dict]] = []

    class Keep(RLHFCallback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            state = module.optimizers().optimizer.state
            moments = {f"{i}.{k}": v.clone() for i, entries in enumerate(state.values()) for k, v in entries.items()}
            states.append((weights(module), moments))

    module = tiny_module(cls=RejectAll, iterations=2, actor={"lr": 1e-3, "weight_decay": 0.1})
    recorder = Recorder()
    trainer = fit(module, [Keep(), recorder])
    assert same(states[0][0], states[1][0]) and same(states[0][1], states[1][1])
    assert trainer.callback_metrics["stability/empty_minibatches"] == 4
    # What was not measured is not 0: metrics of tokens in the loss are absent, fields of stats objects are NaN.
    groups = ("kl/ref", "kl/old", "kl/reward", "ppo/clip", "ppo/ratio", "ppo/policy", "advantage/", "value/", "return/")
    assert not [name for name in trainer.callback_metrics if name.startswith(groups)]
    assert {"reward/mean", "entropy/mean", "tokens/rejected_fraction"} <= trainer.callback_metrics.keys()
    (experience, seen), last = recorder.of("on_experience_ready")[1], recorder.of("on_update_end")[1]
    assert math.isnan(seen.kl_ref) and math.isnan(seen.advantage_abs_mean)
    assert seen.score_mean == pytest.approx(experience.scores.mean().item(), rel=1e-6), "scores are there all the same"
    assert all(math.isnan(value) for value in (last.kl_old, last.kl_ref, last.clip_fraction, last.entropy))
    assert all(math.isfinite(value) for value in trainer.callback_metrics.values())


@pytest.mark.parametrize("normalise", ["none", "batch", "running"])
@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_constant_rewards_give_finite_numbers(estimator: str, normalise: str) -> None:
    def constant(batch: RewardBatch) -> list[float]:
        return [0.35] * len(batch)

    module = tiny_module(
        policy=tiny_policy(critic="separate" if estimator == "gae" else "none"),
        iterations=2,
        reward=constant,
        advantage={"estimator": estimator},
        reward_processing={"normalise": normalise},
    )
    trainer = fit(module)
    assert all(math.isfinite(value) for value in trainer.callback_metrics.values())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


@pytest.mark.parametrize(("placement", "beta"), [("loss", 0.1), ("loss", 0.0), ("reward", 0.0)])
def test_an_infinite_kl_outside_the_reward_is_a_penalty_of_0(
    experience: Experience, placement: str, beta: float
) -> None:
    """A token to which the reference gives no probability: 0 times infinity was NaN in kl/reward_penalty."""
    estimator = "k2" if placement == "loss" else "k1"
    settings = PPOSettings.from_blocks(kl={"placement": placement, "estimator": estimator})
    experience.require("ref_logprobs")[0, 0] = -math.inf
    metrics = MetricBatch()
    compute_advantages(experience, settings, beta, RunningMoments(), metrics)
    numbers = metrics.compute()
    assert numbers["kl/reward_penalty"] == 0
    assert numbers["kl/ref"] == math.inf, "it is measured, and said"
    if not beta:
        assert numbers["reward/total_with_kl"] == pytest.approx(experience.require("scores").mean().item())
    assert experience.require("advantages").isfinite().all() and experience.require("returns").isfinite().all()


def test_one_sample_gives_finite_numbers() -> None:
    module = tiny_module(iterations=2, samples=1, update={"minibatch_size": 1}, max_new_tokens=1)
    trainer = fit(module, data=prompts(module, per_iteration=1))
    assert all(math.isfinite(value) for value in trainer.callback_metrics.values())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


# --- 7. determinism ----------------------------------------------------------------------------------------------


def run(seed: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    recorder = Recorder()
    module = tiny_module(iterations=2, seed=seed)
    torch.manual_seed(torch.seed())  # the global generator must not matter
    fit(module, [recorder])
    return weights(module), [stats.score_mean for _, stats in recorder.of("on_experience_ready")]


def test_same_seed_same_numbers_other_seed_other_numbers() -> None:
    first, again, other = run(1), run(1), run(2)
    assert same(first[0], again[0]) and first[1] == again[1]
    assert not same(first[0], other[0])


def test_a_run_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    fit(tiny_module(iterations=1))
    assert torch.equal(before, torch.get_rng_state())


def test_everything_but_the_weights_stays_float32_in_a_bfloat16_run() -> None:
    """Lightning makes bfloat16 the default dtype there; a tensor made without a dtype would silently lose 16 bits."""
    module, recorder = tiny_module(iterations=2), Recorder()
    fit(module, [recorder], precision="bf16-true")
    assert {p.dtype for p in module.actor.parameters()} == {torch.bfloat16}
    experience, _ = recorder.of("on_experience_ready")[-1]
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "entropy", "values", "scores", "advantages", "returns")
    assert {name: getattr(experience, name).dtype for name in names} == dict.fromkeys(names, torch.float32)
