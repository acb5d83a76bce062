"""PPO-ptx: its gradient, how a minibatch's text is divided, and when the position in the text moves on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_rlhf.callbacks import OOMGuard, RLHFCallback
from lightning_rlhf.data import DataError
from lightning_rlhf.experience import Experience, MiniBatch
from lightning_rlhf.functional.losses import LossScale
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.settings import SettingError
from tests.support import Recorder, fit, resume_equals_whole, same, tiny_module, tiny_policy, weights

LENGTH, BLOCKS = 16, 5
TEXT = [{"text": " ".join(f"{a}*{b}={a * b}" for b in range(12))} for a in range(10)]
PTX: dict[str, Any] = {"source": TEXT, "length": LENGTH, "tokens_per_step": 90, "coefficient": 0.3, "held_out": 3}
"""Five blocks of 16 tokens in every step."""


def ptx_module(ptx: dict[str, Any] | None = PTX, **changes: Any) -> Any:
    return tiny_module(ptx=ptx, iterations=changes.pop("iterations", 2), **changes)


@pytest.fixture(scope="module")
def scored() -> Any:
    """Experience whose old log-probabilities are not those of the policy."""
    recorder = Recorder()
    fit(tiny_module(iterations=1, actor={"lr": 1e-12}), [recorder])
    [(experience, _)] = recorder.of("on_experience_ready")
    noise = torch.randn(experience.old_logprobs.shape, generator=torch.Generator().manual_seed(0))
    experience.old_logprobs = experience.old_logprobs + 0.2 * noise
    return experience


def minibatch(experience: Experience, rows: Tensor | None = None) -> MiniBatch:
    counts = experience.require("loss_mask").sum(-1)
    scale = LossScale(tokens=float(counts.sum()), sequences=float((counts > 0).sum()))
    return MiniBatch.from_experience(experience, torch.arange(len(experience)) if rows is None else rows, scale)


def gradients(module: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def text_gradients(module: Any, blocks: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean loss per predicted token, from the model's own logits."""
    module.zero_grad(set_to_none=True)
    logits = module.actor.lm(input_ids=blocks).logits[:, :-1]
    cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).backward()
    found = gradients(module)
    module.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, name


# --- the gradient ----------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_ppo_plus_gamma_times_the_language_model_loss(scored: Any) -> None:
    """In float64, against the clipped objective and the cross-entropy written out on the model's own logits."""
    module = ptx_module().double()
    batch = minibatch(scored)
    for name in ("old_logprobs", "advantages", "values", "returns", "rollout_logprobs", "ref_logprobs"):
        setattr(batch, name, getattr(batch, name).double())
    metrics = MetricBatch()
    module.micro_batch_loss(batch, metrics).backward()
    found = {name: gradient for name, gradient in gradients(module).items() if name.startswith("actor.")}
    module.zero_grad(set_to_none=True)

    ids, mask = batch.concatenated()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = module.actor.lm(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    width = batch.response_ids.shape[1]
    logprobs = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, batch.response_ids[..., None])[..., 0]
    ratio, advantages = (logprobs - batch.require("old_logprobs")).exp(), batch.require("advantages")
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    policy = -objective[batch.require("loss_mask")].mean()
    blocks = module._ptx.stream.upcoming(BLOCKS)
    text = cross_entropy(module.actor.lm(input_ids=blocks).logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
    (policy + 0.3 * text).backward()
    expected = {name: gradient for name, gradient in gradients(module).items() if name.startswith("actor.")}
    # Rotary angles stay in float32 on both sides.
    assert_close(found, expected, 1e-9)
    numbers = metrics.compute()
    assert numbers["ptx/weighted_loss"] == pytest.approx(0.3 * text.item(), rel=1e-9)
    assert numbers["ppo/policy_loss"] == pytest.approx(policy.item(), rel=1e-9)


COMPOSED: dict[str, dict[str, Any]] = {
    "alone": {},
    "ALP": {"alp": {"ratio": "decoupled", "init_sigma": 0.05, "warmup_steps": 0}},
    "correction": {"rollout_correction": {"rollout_is": "token", "rollout_rs": "token", "rollout_rs_threshold": 2.0}},
    "ALP and correction": {
        "alp": {"ratio": "decoupled", "init_sigma": 0.05, "warmup_steps": 0},
        "rollout_correction": {"rollout_is": "token"},
    },
    "bypass": {"rollout_correction": {"bypass_mode": True}},
    "another temperature": {"temperature": 0.5},
    "ALP and checkpointing": {"alp": {"init_sigma": 0.05}, "policy": {"activation_checkpointing": True}},
    "shared critic": {"policy": {"critic": "shared"}},
    "LoRA": {"policy": {"lora": {"r": 2}}},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_beside_other_mixins_the_text_adds_its_own_gradient_of_the_plain_policy(scored: Any, name: str) -> None:
    settings = dict(COMPOSED[name])
    policy = settings.pop("policy", {})
    found = []
    for ptx in (None, PTX):
        module = ptx_module(ptx, policy=tiny_policy(**policy), **settings)
        module.train()
        batch = minibatch(scored)
        module.micro_batch_loss(batch, MetricBatch()).backward()
        found.append(gradients(module))
    blocks = module._ptx.stream.upcoming(BLOCKS)
    text = text_gradients(module, blocks)
    assert text and all(key.startswith("actor.") for key in text), "only the actor learns from it"
    for key in found[1]:
        added = found[1][key] - found[0][key]
        expected = 0.3 * text.get(key, torch.zeros_like(added))
        assert (added - expected).norm() <= 1e-4 * expected.norm() + 2e-6 * (1 + found[0][key].norm()), key
    assert (name == "LoRA") == any("lora" in key for key in text)


def test_noise_does_not_change_the_loss_that_is_measured() -> None:
    losses = []
    for alp in (None, {"init_sigma": 0.1}):
        module = ptx_module(iterations=1, alp=alp, actor={"lr": 1e-12}, critic={"lr": 1e-12})
        losses.append(float(fit(module).callback_metrics["ptx/loss"]))
    assert losses[0] == losses[1]


# --- the split -------------------------------------------------------------------------------------------------------


class First(RLHFCallback):
    """The gradients of the first step, and the metrics of the first iteration."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.metrics: dict[str, float] = {}

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        self.gradients = self.gradients or gradients(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.metrics = self.metrics or {k: float(v) for k, v in trainer.callback_metrics.items() if "ptx" in k}


def first_step(**update: Any) -> tuple[First, Any]:
    seen, module = First(), ptx_module(iterations=1, update=update, actor={"lr": 1e-12}, critic={"lr": 1e-12})
    fit(module, [seen])
    return seen, module


@pytest.mark.parametrize("update", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 30}])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(update: dict[str, int]) -> None:
    """More micro-batches than blocks, or fewer."""
    (whole, module), (cut, _) = first_step(), first_step(**update)
    assert_close(cut.gradients, whole.gradients, 1e-5)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert whole.metrics["ptx/passes"] == pytest.approx(4 * BLOCKS / len(module._ptx.stream.blocks))


def test_every_block_is_computed_once_whatever_the_number_of_micro_batches() -> None:
    state = ptx_module()._ptx
    for parts in range(1, 9):
        shares = [state.share(part, parts)[0] for part in range(parts)]
        assert torch.equal(torch.cat(shares), state.stream.upcoming(BLOCKS))
        assert max(map(len, shares)) == math.ceil(BLOCKS / parts), "as even as possible"


# --- the position ----------------------------------------------------------------------------------------------------


class Hungry(PPOModule):
    """Has memory for three rows, and finds out after the text's forward pass."""

    def micro_batch_loss(self, micro: Any, metrics: Any) -> Tensor:
        loss = super().micro_batch_loss(micro, metrics)
        if len(micro) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return loss


def test_running_out_of_memory_repeats_the_same_text() -> None:
    found = []
    for cls in (PPOModule, Hungry):
        seen, module = First(), ptx_module(cls=cls, iterations=1)
        fit(module, [seen, OOMGuard()])
        found.append((seen, module._ptx.stream.position, module.control.counts["oom_retry"]))
    (plain, position, _), (hungry, other, retries) = found
    assert retries > 0 and position == other == 4 * BLOCKS
    assert_close(hungry.gradients, plain.gradients, 1e-5)
    assert hungry.metrics["ptx/loss"] == pytest.approx(plain.metrics["ptx/loss"], rel=1e-4)


class Acts(RLHFCallback):
    """Skips or undoes the first step of every iteration."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        if verb in ("minibatch", "iteration"):
            self.rollback_scopes = frozenset({verb})  # type: ignore[assignment]

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        if self.verb == "skip" and stats.epoch == stats.minibatch == 0:
            module.control.skip_step("a test")

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if self.verb != "skip" and stats.epoch == stats.minibatch == 0:
            module.control.rollback("a test", to=self.verb)


@pytest.mark.parametrize(("verb", "minibatches"), [("skip", 4), ("minibatch", 4), ("iteration", 2)])
def test_the_position_moves_on_once_per_minibatch_that_ran(verb: str, minibatches: int) -> None:
    """Also where its step is skipped or undone; the rollback of an iteration ends its epochs after the first one."""
    module = ptx_module(iterations=1)
    before = weights(module)
    recorder = Recorder()
    fit(module, [Acts(verb), recorder])
    ran = len(recorder.of("on_minibatch_end"))
    assert ran <= minibatches and module._ptx.stream.position == ran * BLOCKS
    assert same(before, weights(module)) == (verb == "iteration")


@pytest.mark.parametrize(("bypass", "position"), [(False, 0), (True, 4 * BLOCKS)])
def test_a_minibatch_without_accepted_tokens_takes_no_step_for_the_text(bypass: bool, position: int) -> None:
    """Rejected before the update, its text is not read; rejected by the current policy, it has been."""
    everything = {"rollout_rs": "token", "rollout_rs_threshold": "0.9998_0.9999", "bypass_mode": bypass}
    module = ptx_module(iterations=1, rollout_correction=everything)
    before = weights(module)
    trainer = fit(module)
    assert same(before, weights(module)) and module.control.counts["empty_minibatches"] == 4
    assert module._ptx.stream.position == position
    assert ("ptx/loss" in trainer.callback_metrics) == bypass, "measured or absent"


def test_a_coefficient_of_0_reads_no_text() -> None:
    class Off(RLHFCallback):
        def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
            module.control.scale("ptx_coefficient", 0.0, by="a test")

    module, plain = ptx_module(), ptx_module(None)
    trainer = fit(module, [Off()])
    fit(plain)
    assert same(weights(module), weights(plain)) and module._ptx.stream.position == 0
    assert float(trainer.callback_metrics["ptx/coefficient"]) == 0 and "ptx/loss" not in trainer.callback_metrics


def test_a_resume_in_the_middle_of_the_text_equals_the_whole_run(tmp_path: Path) -> None:
    """With less text than the run reads, so that the order of the second pass counts, too."""
    settings = PTX | {"source": TEXT[:4]}
    made: list[Any] = []

    def module() -> Any:
        made.append(ptx_module(settings, iterations=4))
        return made[-1]

    resume_equals_whole(tmp_path, lambda: [], module)
    whole, resumed = (each._ptx.stream for each in made)
    assert whole.position == resumed.position == 16 * BLOCKS and whole.passes > 1
    assert (8 * BLOCKS) % len(whole.blocks) > 0, "resumed in the middle of a pass"


def test_a_run_that_had_no_text_can_be_resumed_with_one(tmp_path: Path) -> None:
    made: list[Any] = [ptx_module(None, iterations=4), ptx_module(iterations=4)]
    from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState

    for module, resume in zip(made, (None, tmp_path / "iteration_000002.ckpt"), strict=True):
        saves = IterationCheckpoint(str(tmp_path), every_n_iterations=2, keep=None)
        fit(module, [RNGState(), saves], folder=tmp_path, resume=resume, enable_checkpointing=True)
    assert made[1]._ptx.stream.position == 8 * BLOCKS


# --- metrics, silence, errors ----------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_all_tokens_before_each_step() -> None:
    """With weights that hardly move it is the loss of the first 20 blocks on the model's own logits."""
    module = ptx_module(iterations=1, actor={"lr": 1e-12}, critic={"lr": 1e-12})
    metrics = fit(module).callback_metrics
    stream = module._ptx.stream
    stream.position = 0
    blocks = stream.upcoming(4 * BLOCKS)
    expected = cross_entropy(module.actor.lm(input_ids=blocks).logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
    assert float(metrics["ptx/loss"]) == pytest.approx(expected.item(), rel=1e-5)
    assert float(metrics["ptx/perplexity"]) == pytest.approx(math.exp(expected.item()), rel=1e-5)
    assert float(metrics["ptx/coefficient"]) == pytest.approx(0.3) == float(metrics["knob/ptx_coefficient"])


def test_held_out_blocks_are_never_trained_on_and_can_be_none() -> None:
    module, whole = ptx_module(), ptx_module(PTX | {"held_out": 0})
    everything = {tuple(row) for row in whole._ptx.stream.blocks.tolist()}
    parts = (module.held_out_text, module._ptx.stream.blocks)
    kept, trained = ({tuple(row) for row in part.tolist()} for part in parts)
    assert len(kept) == 3 and not kept & trained and kept | trained == everything
    assert whole.held_out_text is None and ptx_module(None).held_out_text is None


def test_the_loss_of_a_text_is_measured_without_a_trace() -> None:
    module = ptx_module(iterations=1)
    fit(module)
    blocks = module._ptx.stream.blocks[:7]
    module.actor.train()
    module.actor.lm.model.layers[0].eval()
    modes = [part.training for part in module.modules()]
    before, generator = weights(module), torch.get_rng_state()
    found = module.text_loss(blocks)
    ids = blocks.long()
    expected = cross_entropy(module.actor.lm(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert found == pytest.approx(expected.item(), rel=1e-6)
    assert same(before, weights(module)) and torch.equal(generator, torch.get_rng_state())
    assert modes == [part.training for part in module.modules()] and module._ptx.stream.position == 4 * BLOCKS
    object.__setattr__(module.settings.update, "score_tokens", 1)
    assert module.text_loss(blocks) == pytest.approx(found, rel=1e-6), "one block at a time"


def test_without_a_block_nothing_is_added() -> None:
    module = ptx_module(None, iterations=1)
    trainer = fit(module)
    assert not any("ptx" in name for name in trainer.callback_metrics) and "ptx_coefficient" not in module.control.knobs
    with pytest.raises(RuntimeError, match=r"module\.ptx is null"):
        module.read_text(TEXT, text_field="text", key="callbacks.adaptive_ptx.text")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": None}, r"module\.ptx\.source = None is not allowed: a file"),
        ({"text_field": ""}, r"module\.ptx\.text_field = '' is not allowed: the name of a column"),
        ({"length": 1}, r"module\.ptx\.length = 1 is not allowed: a whole number >= 2"),
        ({"length": 65, "tokens_per_step": 65}, r"module\.ptx\.length = 65 is not allowed: at most the model's 64"),
        ({"tokens_per_step": 15}, r"module\.ptx\.tokens_per_step = 15 is not allowed: a whole number >= 16"),
        ({"coefficient": 0}, r"module\.ptx\.coefficient = 0 is not allowed: a finite number > 0"),
        ({"held_out": -1}, r"module\.ptx\.held_out = -1 is not allowed: a whole number >= 0"),
        (
            {"held_out": 51},
            r"held_out = 51 is not allowed: a number below (\d+), as the text has \1 blocks of 16 tokens "
            r"\(module\.ptx\.length\); shorter blocks, such as module\.ptx\.length=8, give more",
        ),
        ({"gamma": 1}, r"module\.ptx\.gamma = 1 is not allowed: .*known keys: source"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        ptx_module(PTX | changes)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "there is no row"),
        ([{"words": "1+1=2"}], r"list:0: the row has no text in the column 'text' \(columns: words\)"),
        ([{"text": "1+1=2"}], r"the text has 6 tokens, fewer than one block of module\.ptx\.length = 16"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(source: Sequence[Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"module\.ptx\.source: {said}"):
        ptx_module(PTX | {"source": source})


def test_a_block_without_a_source_is_refused_before_anything_is_read(compose: Any) -> None:
    from lightning_rlhf import schema

    with pytest.raises(schema.ConfigError, match=r"module\.ptx\.source = '\?\?\?'"):
        schema.check(compose("ptx=default"))
