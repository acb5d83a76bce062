"""Bypass mode, where rejection depends on the current policy: rejected tokens are in no loss and no metric."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.experience import MiniBatch, PromptBatch, Rollout
from lightning_rlhf.functional.losses import LossScale
from lightning_rlhf.metrics import Metric, names, register
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rollout import HFEngine
from tests.ranks import run_ranks
from tests.support import Recorder, fit, moments, prompts, same, tiny_module, tiny_policy, weights

TOKEN: dict[str, Any] = {"bypass_mode": True, "rollout_rs": "token", "rollout_rs_threshold": 1.5}


class OffEngine(HFEngine):
    """Agrees with the trainer at first; after ``after`` calls it is off by 1, on one row of ``share``."""

    after, calls, share = 1, 0, 1

    def generate(self, prompts: PromptBatch, **options: Any) -> Rollout:
        rollout = super().generate(prompts, **options)
        self.calls += 1
        if self.calls <= self.after:
            return rollout
        off = (rollout.seed % self.share == 0).unsqueeze(1) & rollout.response_mask
        return replace(rollout, rollout_logprobs=rollout.rollout_logprobs - off.float())


class Pulled(PPOModule):
    """A further loss that would move every weight of the actor, whatever is rejected."""

    def extra_losses(self, minibatch: MiniBatch) -> dict[str, torch.Tensor]:
        pull = torch.stack([weight.square().sum() for weight in self.actor.parameters()]).sum()
        return super().extra_losses(minibatch) | {"extra/pull": 0.1 * pull / minibatch.tokens}


EVERY_LOSS: dict[str, Any] = {
    "loss": {"entropy_coefficient": 0.1},
    "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.5},
    "actor": {"lr": 1e-3, "weight_decay": 0.1},
    "critic": {"lr": 1e-3, "weight_decay": 0.1},
}


def off(*, after: int = 1, share: int = 1, block: dict[str, Any] = TOKEN, **options: Any) -> Any:
    module = tiny_module(**({"rollout_correction": block} | EVERY_LOSS | options))
    module.engine = OffEngine(samples=2, max_new_tokens=10)
    module.engine.after, module.engine.share = after, share
    return module


class Notes(RLHFCallback):
    """Weights, moments and metrics after every iteration."""

    def __init__(self) -> None:
        self.states: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self.curve: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.states.append((weights(module), moments(module)))
        self.curve.append({name: float(value) for name, value in trainer.callback_metrics.items()})


# --- everything rejected -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_without_an_accepted_token_no_step_is_taken(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum, weight decay, entropy, KL, values and a custom term once moved weights by up to 0.029."""
    monkeypatch.setattr(names, "METRICS", list(names.METRICS))
    register(Metric("extra/pull", "1", "neither", "steps", "A term of this test."))
    block = TOKEN | {"loss_type": loss_type} | ({"rollout_is": "token"} if loss_type == "reinforce" else {})
    notes, recorder = Notes(), Recorder()
    module = off(iterations=2, cls=Pulled, block=block)
    fit(module, [notes, recorder])
    (first, second), (before, after) = notes.states, notes.curve
    assert first[1] and same(first[0], second[0]) and same(first[1], second[1]), "bitwise, moments as well"
    assert (before["stability/empty_minibatches"], after["stability/empty_minibatches"]) == (0, 4)
    assert module.control.update == 4
    assert (after["ppo/epochs_used"], after["ppo/updates"], after["ppo/steps_skipped"]) == (0, 0, 0)
    assert after["rollout_corr/accepted_fraction"] == 0
    gone = {"ppo/policy_loss", "ppo/value_loss", "ppo/clip_fraction", "ppo/ratio_max", "ppo/ratio_mean", "kl/old",
            "kl/ref_update", "kl/loss", "entropy/update", "value/clip_fraction", "extra/pull"}  # fmt: skip
    assert gone <= before.keys() and not gone & after.keys(), "nothing measured is absent, not 0"
    assert all(math.isfinite(value) for value in after.values())
    seen = recorder.of("on_minibatch_end")[4:]
    assert [(s.tokens, s.stepped, s.finite) for s in seen] == [(0, False, True)] * 4
    for name in ("policy_loss", "value_loss", "kl_old", "kl_ref", "clip_fraction", "ratio_max", "entropy"):
        assert all(math.isnan(getattr(s, name)) for s in seen), name
    assert len(recorder.of("on_before_step")) == 4 and len(recorder.of("on_ppo_epoch_end")) == 2
    last = recorder.of("on_update_end")[1]
    assert (last.epochs_used, last.steps, last.steps_skipped) == (0, 0, 0)
    assert all(math.isnan(x) for x in (last.kl_old, last.kl_ref, last.clip_fraction, last.entropy))


def test_noise_and_balance_of_experts_are_left_alone_without_an_accepted_token() -> None:
    """Of ALP on a mixture of experts: log sigma, its moments and the moving average of the utilisation."""
    from tests.mixins.test_alp import FREE, mixtral

    class Utilisation(RLHFCallback):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.seen.append(module.router_perturbation.utilisation.clone())

    alp = FREE | {"ratio": "decoupled", "router": {"init_sigma": 1e-5, "balance": 0.5}}
    notes, utilisation = Notes(), Utilisation()
    module = off(iterations=2, policy=mixtral(), alp=alp, advantage={"estimator": "grpo"})
    fit(module, [notes, utilisation])
    (first, second), (before, after) = notes.states, notes.curve
    assert after["stability/empty_minibatches"] == 4
    assert same(first[0], second[0]) and same(first[1], second[1])
    assert torch.equal(*utilisation.seen) and not torch.equal(utilisation.seen[0], torch.full((2, 4), 0.25))
    assert "alp/balance_loss" in before and "alp/balance_loss" not in after


def test_steps_end_where_the_policy_has_left_the_band() -> None:
    """Every token is accepted at first; later the policy itself is outside, and from there on nothing moves."""

    class Trace(RLHFCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[float, bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

        def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
            self.seen.append((stats.tokens, stats.stepped, weights(module), moments(module)))

    trace = Trace()
    tight = {"bypass_mode": True, "rollout_rs": "sequence", "rollout_rs_threshold": 1.0001}
    module = off(iterations=1, after=9, block=tight, actor={"lr": 0.3, "clip_norm": None})
    fit(module, [trace])
    tokens = [t for t, *_ in trace.seen]
    assert tokens[0] > 0 and 0 in tokens
    for (_, _, *before), (count, stepped, *after) in zip(trace.seen, trace.seen[1:], strict=False):
        assert stepped == (count > 0)
        if not count:
            assert same(before[0], after[0]) and same(before[1], after[1])


# --- some rejected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejected_tokens_contribute_to_no_loss(mode: Any, level: str) -> None:
    """Values, entropy and KL of a minibatch are those of its accepted tokens: rejected ones left a norm of 0.017."""
    loss = {"entropy_coefficient": 0.1, "aggregation": mode, "ratio_level": level}
    recorder = Recorder()
    module = off(iterations=1, after=0, share=2, loss=loss)
    fit(module, [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    counts = experience.loss_mask.sum(-1)
    scale = LossScale(mode, tokens=float(counts.sum()), sequences=float((counts > 0).sum()))
    whole = MiniBatch.from_experience(experience, torch.arange(len(experience)), scale)
    module._correction.begin(2)
    found, metrics = gradients(module, whole)
    with torch.no_grad():
        current = module.actor_logprobs(whole).logprobs
    keep = whole.response_mask & ((current - whole.rollout_logprobs).abs() <= math.log(1.5))
    assert 0 < keep.sum() < whole.response_mask.sum()
    module._correction = None
    expected, numbers = gradients(module, replace(whole, loss_mask=keep))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert metrics == numbers, "the metrics, too: their denominators are the accepted tokens"
    other, _ = gradients(module, whole)
    assert any(not torch.equal(found[name], gradient) for name, gradient in other.items())


def gradients(module: Any, minibatch: MiniBatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    module.zero_grad()
    metrics = MetricBatch()
    module.micro_batch_loss(minibatch, metrics).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}, metrics.compute()


@pytest.mark.parametrize("gap", [-3.0, 6.0])
def test_a_rejected_token_is_not_in_the_ratio_of_its_sequence(gap: float) -> None:
    """10 tokens, one off by -3 or +6: the mean once gave the other nine the ratio 0.741 or 1.82 (clipped)."""
    module = off(iterations=1, loss={"ratio_level": "sequence", "clip_low": 0.2, "clip_high": 0.2})
    module._correction.begin(1)
    logprobs = torch.full((1, 10), -1.0)
    rollout = logprobs.clone()
    rollout[0, 4] -= gap
    ones, one = torch.ones(1, 10, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
    minibatch = MiniBatch(
        prompt_ids=torch.ones(1, 1, dtype=torch.int64), prompt_mask=ones[:, :1], response_ids=ones.long(),
        response_mask=ones, rollout_logprobs=rollout, finish=one, policy_version=one, seed=one, group=one,
        prompt_key=["a"], old_logprobs=rollout, advantages=torch.ones(1, 10), loss_mask=ones,
        scale=LossScale(tokens=10.0, sequences=1.0),
    )  # fmt: skip
    logprobs.requires_grad_()
    result = module.policy_loss(minibatch, logprobs)
    result.loss.backward()
    assert result.accepted is not None and result.accepted.sum() == 9
    assert result.ratio[result.accepted].tolist() == [1.0] * 9
    assert result.loss.item() == pytest.approx(-0.9), "nine tokens with ratio 1, over the ten that were counted before"
    assert logprobs.grad is not None
    assert logprobs.grad[result.accepted].tolist() == pytest.approx([-0.1] * 9) and logprobs.grad[0, 4] == 0


# --- any number of ranks -----------------------------------------------------------------------------------------


def train_off(rank: int, share: int) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    notes = Notes()
    module = off(iterations=2, share=share, policy=tiny_policy(critic="shared"))
    several = {} if world == 1 else {"strategy": DDPStrategy(), "devices": world}
    fit(module, [notes], data=prompts(module, per_iteration=8), **several)
    return {"curve": notes.curve, "states": notes.states}


UNEQUAL = ("time/", "perf/", "tok/s", "rollout/logprob_abs_diff", "advantage/mean")


@pytest.mark.parametrize("share", [1, 2])
def test_ranks_skip_together_and_learn_what_one_process_learns(tmp_path: Path, share: int) -> None:
    """Rejected as a whole (1), or on every second row (2), so that ranks differ in their accepted tokens."""
    alone = train_off(0, share)
    first, second = run_ranks(train_off, share, folder=tmp_path)
    for mine, other in zip(first["states"], second["states"], strict=True):
        assert same(mine[0], other[0]) and same(mine[1], other[1])
    for expected, found, beside in zip(alone["curve"], first["curve"], second["curve"], strict=True):
        assert expected.keys() == found.keys() == beside.keys(), "a metric is absent on all ranks or on none"
        for name in expected:
            if not name.startswith(UNEQUAL):
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    empty = [curve["stability/empty_minibatches"] for curve in first["curve"]]
    assert empty == ([0, 4] if share == 1 else [0, 0])
    (before, _), (after, _) = first["states"]
    assert same(before, after) == (share == 1)
