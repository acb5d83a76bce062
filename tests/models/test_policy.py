from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.models.critic import SeparateCritic, SharedCritic
from lightning_rlhf.models.loading import LoadedModel, assert_no_dropout, disable_dropout
from lightning_rlhf.models.policy import build_policy
from lightning_rlhf.models.reference import AdapterReference, FrozenReference
from lightning_rlhf.models.tiny import build_tiny, character_tokenizer
from lightning_rlhf.models.weights import lora_layers


def loaded(lm: PreTrainedModel) -> LoadedModel:
    return LoadedModel(lm, character_tokenizer("01"), "test")


@pytest.mark.parametrize(
    ("critic", "kind"), [("separate", SeparateCritic), ("shared", SharedCritic), ("none", type(None))]
)
@pytest.mark.parametrize(
    ("reference", "lora", "reference_kind"),
    [
        ("copy", None, FrozenReference),
        ("copy", {"r": 2}, AdapterReference),
        ("none", None, type(None)),
        ("none", {"r": 2}, type(None)),
    ],
)
def test_parts_of_a_policy(
    make_lm: Any, critic: Any, kind: type, reference: Any, lora: Any, reference_kind: type
) -> None:
    lm = make_lm()
    model = loaded(lm)
    policy: Any = build_policy(model, critic=critic, reference=reference, lora=lora)
    assert isinstance(policy.critic, kind)
    assert isinstance(policy.reference, reference_kind)
    assert policy.actor.lm is lm
    assert policy.tokenizer is model.tokenizer
    assert policy.source == "test"
    trained = {name for name, parameter in policy.actor.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in policy.actor.named_parameters() if lora is None or ".lora_" in name}


@pytest.mark.parametrize("key", ["critic", "reference"])
def test_unknown_kinds_are_refused(make_lm: Any, key: str) -> None:
    with pytest.raises(ValueError, match=rf"policy\.{key} = 'non' is not allowed.*did you mean 'none'"):
        build_policy(loaded(make_lm()), **cast(Any, {key: "non"}))


def test_everything_trained_is_in_training_mode_without_dropout(make_lm: Any, batch: Any) -> None:
    """Lightning keeps the mode it finds; in evaluation mode activation checkpointing would do nothing."""
    lm = make_lm("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).eval()
    policy: Any = build_policy(loaded(lm))
    assert all(module.training for module in policy.actor.modules())
    assert all(module.training for module in policy.critic.modules())
    inputs = batch.input_ids, batch.attention_mask, batch.response_length
    assert torch.equal(policy.actor(*inputs).logprobs, policy.actor(*inputs).logprobs)
    torch.testing.assert_close(policy.actor(*inputs).logprobs, policy.reference.logprobs(*inputs), atol=1e-6, rtol=0)
    assert_no_dropout(policy.critic)


def test_an_architecture_that_would_be_scored_wrongly_is_refused(make_lm: Any) -> None:
    lm = make_lm()
    lm.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        build_policy(loaded(lm))


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_building_depends_on_the_seed_and_not_on_the_global_generator(make_lm: Any, lora: Any) -> None:
    def build(seed: int) -> dict[str, Tensor]:
        policy: Any = build_policy(loaded(make_lm()), lora=lora, seed=seed)
        return nn.ModuleList([policy.actor, policy.critic]).state_dict()

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = build(1), build(2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items()) == (lora is None)


# --- activation checkpointing ------------------------------------------------------------------------------------


def losses_and_gradients(policy: Any, batch: Any) -> tuple[list[Tensor], dict[str, Tensor], int]:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for module in policy.actor.modules():
        if type(module).__name__ in ("LlamaMLP", "GPT2MLP"):
            module.register_forward_pre_hook(count)  # recomputation ends before the layer does
    inputs = batch.input_ids, batch.attention_mask, batch.response_length
    out = policy.actor(*inputs, entropy="gradient", with_hidden=True)
    shared = isinstance(policy.critic, SharedCritic)
    values = policy.critic(out.hidden) if shared else policy.critic(*inputs)
    parts = [out.logprobs.sum(), out.entropy.sum(), (values - 1).square().sum()]
    sum(parts).backward()
    modules = nn.ModuleDict({"actor": policy.actor, "critic": policy.critic})
    gradients = {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}
    return [part.detach() for part in parts], gradients, calls


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_activation_checkpointing_changes_no_number(
    make_lm: Any, batch: Any, architecture: str, critic: Any, lora: Any
) -> None:
    results = {}
    for checkpointing in (False, True):
        policy: Any = build_policy(
            loaded(make_lm(architecture)), critic=critic, lora=lora, activation_checkpointing=checkpointing
        )
        with torch.no_grad():
            policy.critic.head.weight.fill_(0.1)
            for name, parameter in policy.actor.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.05)
        results[checkpointing] = losses_and_gradients(policy, batch)
    (losses, gradients, calls), (same_losses, same_gradients, more_calls) = results[False], results[True]
    assert calls == 2  # one call per layer
    assert more_calls == 4  # computed again in the backward pass
    torch.testing.assert_close(same_losses, losses)
    assert gradients
    assert same_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, msg=name)


def test_activation_checkpointing_of_the_separate_critic(make_lm: Any) -> None:
    policy: Any = build_policy(loaded(make_lm()), critic="separate", activation_checkpointing=True)
    assert policy.critic.backbone.is_gradient_checkpointing
    assert policy.actor.lm.is_gradient_checkpointing
    assert not policy.reference.actor.lm.is_gradient_checkpointing


# --- LoRA --------------------------------------------------------------------------------------------------------


def test_fresh_adapter(make_lm: Any) -> None:
    policy: Any = build_policy(loaded(make_lm()), lora={"r": 3, "alpha": 12, "target_modules": ["q_proj", "down_proj"]})
    layers = lora_layers(policy.actor.lm)
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "down_proj"}
    assert {layer.scaling["policy"] for layer in layers.values()} == {4.0}
    assert {layer.r["policy"] for layer in layers.values()} == {3}
    every = build_policy(loaded(make_lm()), lora={"r": 3, "alpha": None, "adapter": None})  # null: left unset
    assert len(lora_layers(every.actor.lm)) == 2 * 7  # every linear layer of two blocks, not the head
    assert {layer.scaling["policy"] for layer in lora_layers(every.actor.lm).values()} == {2.0}
    separate = {name for name, parameter in policy.critic.named_parameters() if parameter.requires_grad}
    assert separate == {name for name, _ in policy.critic.named_parameters() if ".lora_" in name or "head." in name}


def test_adapters_stay_in_float32_on_a_model_in_low_precision() -> None:
    model = build_tiny("01", hidden_size=16, layers=1, heads=2, dtype="bfloat16")
    policy: Any = build_policy(model, lora={"r": 2})
    dtypes = {".lora_" in name: parameter.dtype for name, parameter in policy.actor.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    ids = torch.tensor([[2, 3, 2, 3]])
    policy.actor(ids, torch.ones_like(ids, dtype=torch.bool), 2).logprobs.sum().backward()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 2}, r"policy\.lora = 'rank' is not allowed: one of r, alpha"),
        ({"r": 0}, r"policy\.lora\.r = 0 is not allowed: a whole number >= 1"),
        ({"r": 2.5}, r"policy\.lora\.r = 2\.5 is not allowed"),
        ({"alpha": -1}, r"policy\.lora\.alpha = -1 is not allowed: a finite number > 0"),
        ({"dropout": 0.1}, r"policy\.lora\.dropout = 0\.1 is not allowed: only 0"),
        ({"target_modules": ["query"]}, r"does not fit LlamaForCausalLM.*query"),
        ({"target_modules": ["lm_head"]}, r"adapts lm_head \(Linear\): only linear layers below"),
        ({"target_modules": ["embed_tokens"]}, r"adapts model\.embed_tokens \(Embedding\): only linear layers below"),
        ({"adapter": "nowhere"}, r"policy\.lora\.adapter = 'nowhere': no folder with an adapter_config\.json"),
        ({"adapter": "nowhere", "r": 2}, r"policy\.lora\.r cannot be set together with lora\.adapter"),
    ],
)
def test_lora_settings_are_checked(make_lm: Any, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_policy(loaded(make_lm()), lora=lora)


def write_adapter(lm: PreTrainedModel, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"lora_bias": True}, "lora_bias = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"peft_type": "LOHA"}, "is of type .*LOHA, not LORA"),
        ({"target_modules": ["q_proj", "k_proj"]}, "does not fit the model: 4 keys, model.layers.0.self_attn.k_proj"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    make_lm: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_adapter(make_lm(), tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    if changes.get("peft_type") == "LOHA":
        config = {"peft_type": "LOHA", "target_modules": ["q_proj"]}
    path.write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        build_policy(loaded(make_lm()), lora={"adapter": str(tmp_path)})


def test_trained_adapter_dropout_is_off(make_lm: Any, tmp_path: Path) -> None:
    write_adapter(make_lm(), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.3}))
    policy: Any = build_policy(loaded(make_lm()), lora={"adapter": str(tmp_path)})
    assert_no_dropout(policy.actor)


def test_lora_without_peft_says_so(make_lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "peft":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="needs the package peft: pip install"):
        build_policy(loaded(make_lm()), lora={"r": 2})


# --- dropout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "rates"),
    [
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        ("llama", {"attention_dropout": 0.1}),
        ("opt", {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5}),
    ],
)
def test_dropout_is_switched_off_everywhere(make_lm: Any, batch: Any, architecture: str, rates: dict[str, Any]) -> None:
    lm = make_lm(architecture, **rates).train()
    with pytest.raises(RuntimeError, match=r"dropout must be off.*= 0\.1"):
        assert_no_dropout(lm)
    disable_dropout(lm)
    assert_no_dropout(lm)
    assert all(getattr(lm.config, name) == 0 for name in rates)
    mask = batch.attention_mask.long()
    with torch.no_grad():
        trained = lm(input_ids=batch.input_ids, attention_mask=mask).logits
        evaluated = lm.eval()(input_ids=batch.input_ids, attention_mask=mask).logits
    assert torch.equal(trained, evaluated)
