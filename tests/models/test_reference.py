from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.models.actor import Actor
from lightning_rlhf.models.loading import LoadedModel
from lightning_rlhf.models.policy import build_policy
from lightning_rlhf.models.reference import AdapterReference, FrozenReference, active_adapter, fingerprint
from lightning_rlhf.models.tiny import character_tokenizer
from lightning_rlhf.models.weights import lora_layers

CASES = ["copy", "fresh adapter", "trained adapter"]


def trained_adapter(lm: PreTrainedModel, folder: Path) -> str:
    """A folder with a non-zero adapter, as peft writes it; ``lm`` is left alone."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    model = get_peft_model(copy.deepcopy(lm), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(str(folder))
    return str(folder)


def policy_of(case: str, lm: PreTrainedModel, folder: Path) -> Any:
    loaded = LoadedModel(lm, character_tokenizer("01"), "test")
    lora: dict[str, Any] | None = {"r": 2}
    if case == "trained adapter":
        lora = {"adapter": trained_adapter(lm, folder)}
    return build_policy(loaded, critic="none", lora=None if case == "copy" else lora)


def scores(policy: Any, batch: Any) -> tuple[Tensor, Tensor]:
    inputs = batch.input_ids, batch.attention_mask, batch.response_length
    with torch.no_grad():
        actor = policy.actor(*inputs, temperature=0.8).logprobs
    return actor[batch.response_mask], policy.reference.logprobs(*inputs, 0.8)[batch.response_mask]


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_starting_policy_and_stays_it(make_lm: Any, batch: Any, tmp_path: Path, case: str) -> None:
    """KL is 0 at step 0; adding 0.1 to one trained weight changes the policy and no bit of the reference."""
    lm = make_lm()
    plain = Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length, temperature=0.8).logprobs.detach()
    policy = policy_of(case, lm, tmp_path)
    actor, reference = scores(policy, batch)
    torch.testing.assert_close(actor, reference, atol=1e-6, rtol=0)
    far = (actor - plain[batch.response_mask]).abs().max()
    assert far > 0.01 if case == "trained adapter" else far < 1e-6  # the adapter that was given is in force
    mark = policy.reference.fingerprint()

    trained = [parameter for parameter in policy.actor.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:  # every one, since a fresh adapter's A alone changes nothing
            parameter.add_(0.1)
    moved, unmoved = scores(policy, batch)
    assert (moved - actor).abs().max() > 0.01
    assert torch.equal(unmoved, reference)
    assert policy.reference.fingerprint() == mark


def test_one_changed_weight_moves_the_policy_and_not_the_reference(make_lm: Any, batch: Any, tmp_path: Path) -> None:
    policy = policy_of("trained adapter", make_lm(), tmp_path)
    actor, reference = scores(policy, batch)
    parameter = next(p for p in policy.actor.parameters() if p.requires_grad)
    with torch.no_grad():
        parameter.view(-1)[0].add_(0.1)
    moved, unmoved = scores(policy, batch)
    assert not torch.equal(moved, actor)
    assert torch.equal(unmoved, reference)


@pytest.mark.parametrize("case", CASES)
def test_reference_has_no_gradient_and_leaves_the_actor_as_it_was(
    make_lm: Any, batch: Any, tmp_path: Path, case: str
) -> None:
    policy = policy_of(case, make_lm(), tmp_path)
    frozen = next(parameter for parameter in policy.actor.parameters() if parameter.requires_grad)
    frozen.requires_grad_(False)  # by a user's hand: not to be undone
    gradients = [parameter.requires_grad for parameter in policy.actor.parameters()]
    modes = [module.training for module in policy.actor.modules()]
    inputs = batch.input_ids, batch.attention_mask, batch.response_length
    before = policy.actor(*inputs).logprobs.detach()
    scorer = policy.reference.actor if case == "copy" else policy.actor
    seen: list[bool] = []
    hook = scorer.lm.model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    logprobs = policy.reference.logprobs(*inputs)
    hook.remove()
    assert seen == [False]  # in evaluation mode
    assert not logprobs.requires_grad
    assert logprobs.dtype == torch.float32
    assert [parameter.requires_grad for parameter in policy.actor.parameters()] == gradients
    assert [module.training for module in policy.actor.modules()] == modes
    assert all(modes)
    assert torch.equal(policy.actor(*inputs).logprobs, before)
    policy.actor(*inputs).logprobs.sum().backward()
    touched = {name for name, parameter in policy.actor.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, parameter in policy.actor.named_parameters() if parameter.requires_grad}


def test_frozen_reference_is_a_copy_that_stays_in_evaluation_mode(make_lm: Any) -> None:
    lm = make_lm()
    holder = nn.ModuleDict({"reference": FrozenReference(lm), "actor": Actor(lm)})
    holder.train()
    assert holder["actor"].training
    assert not any(module.training for module in holder["reference"].modules())
    assert not any(parameter.requires_grad for parameter in holder["reference"].parameters())
    assert all(parameter.requires_grad for parameter in lm.parameters())
    own = {parameter.data_ptr() for parameter in holder["reference"].parameters()}
    assert not own & {parameter.data_ptr() for parameter in lm.parameters()}


@pytest.mark.parametrize("case", ["fresh adapter", "trained adapter"])
def test_the_actors_adapter_comes_back_after_an_error(make_lm: Any, batch: Any, tmp_path: Path, case: str) -> None:
    policy = policy_of(case, make_lm(), tmp_path)
    assert isinstance(policy.reference, AdapterReference)
    lm = policy.actor.lm
    state = {name: (layer.active_adapters, layer.disable_adapters) for name, layer in lora_layers(lm).items()}
    gradients = [parameter.requires_grad for parameter in lm.parameters()]
    broken = batch.input_ids.clone()
    broken[0, 0] = 10**6
    with pytest.raises(IndexError, match="out of range"):
        policy.reference.logprobs(broken, batch.attention_mask, batch.response_length)
    with pytest.raises(KeyboardInterrupt), active_adapter(lm, None):
        assert all(layer.disable_adapters for layer in lora_layers(lm).values())
        raise KeyboardInterrupt
    assert state
    assert {n: (x.active_adapters, x.disable_adapters) for n, x in lora_layers(lm).items()} == state
    assert [parameter.requires_grad for parameter in lm.parameters()] == gradients
    assert policy.actor.training


def test_adapter_reference_owns_no_weights(make_lm: Any, tmp_path: Path) -> None:
    """The base model is not copied, and the frozen adapter is in the actor's state, so checkpoints hold it once."""
    policy = policy_of("trained adapter", make_lm(), tmp_path)
    assert not isinstance(policy.reference, nn.Module)
    trained = {name for name, parameter in policy.actor.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".policy." in name for name in trained)
    assert any(".reference." in name for name in policy.actor.state_dict())
    assert not any("lora_" in name for name in policy.actor.export_state_dict())


# --- fingerprints ------------------------------------------------------------------------------------------------


def test_fingerprint_sees_every_bit_every_name_and_every_shape(make_lm: Any) -> None:
    lm = make_lm()
    mark = fingerprint(lm)
    assert len(mark) == 64
    assert fingerprint(make_lm()) == mark
    assert fingerprint(make_lm(seed=1)) != mark
    weight = lm.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(10.0))
    assert fingerprint(lm) != mark

    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    marks = {
        fingerprint(nn.ParameterDict({"x": a})),
        fingerprint(nn.ParameterDict({"x": b})),
        fingerprint(nn.ParameterDict({"y": a})),
        fingerprint(nn.ParameterDict({"x": nn.Parameter(a.to(torch.bfloat16))})),
        fingerprint(nn.ParameterDict({"x": nn.Parameter(a.to(torch.float16))})),
        fingerprint(nn.ParameterDict({"x": nn.Parameter(a - 0.0)})),
        fingerprint(nn.ParameterDict({"x": nn.Parameter(-a)})),  # minus zero: equal in value, not in bits
    }
    assert len(marks) == 6
    assert fingerprint(nn.ParameterDict({"x": nn.Parameter(b.data.T)})) == fingerprint(nn.ParameterDict({"x": a}))


def test_fingerprint_of_the_frozen_part(make_lm: Any) -> None:
    lm = make_lm()
    lm.model.embed_tokens.requires_grad_(False)
    mark = fingerprint(lm, frozen_only=True)
    with torch.no_grad():
        lm.model.norm.weight.add_(1)
    assert fingerprint(lm, frozen_only=True) == mark
    with torch.no_grad():
        lm.model.embed_tokens.weight.add_(1)
    assert fingerprint(lm, frozen_only=True) != mark
