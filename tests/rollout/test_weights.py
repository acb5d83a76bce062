"""Weights on their way to an engine: names, ties, wrappers, merged adapters, rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_rlhf.models import build_policy, build_tiny
from lightning_rlhf.models.weights import checkpoint_weights, lora_layers, plain_name
from lightning_rlhf.rollout.weights import named_weights, round_weight


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **settings))


def lora_model(dtype: str = "float32"):
    """A model whose fresh adapter has been made non-zero."""
    loaded = build_tiny("0123456789", hidden_size=16, layers=2, heads=2, dtype=dtype)
    lm = build_policy(loaded, critic="none", lora={"r": 2}).actor.lm
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return lm


def test_every_weight_once_under_its_checkpoint_name(tmp_path) -> None:
    from safetensors.torch import load_file

    lm = llama()
    lm.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), list(named_weights(lm))
    assert len(sent) == len(dict(sent)) == len(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent)
    assert not any(tensor.requires_grad for _, tensor in sent)
    assert dict(sent)["lm_head.weight"].data_ptr() == lm.lm_head.weight.data_ptr()  # the live weight, no copy


@pytest.mark.parametrize("make", [llama, lambda **s: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, **s))])
def test_a_tied_head_is_sent_once(make) -> None:
    lm = make(tie_word_embeddings=True)
    names = [name for name, _ in named_weights(lm)]
    assert "lm_head.weight" not in names and len(names) == len(list(lm.parameters()))
    assert "lm_head.weight" in dict(checkpoint_weights(lm))


class Wrapper(nn.Module):
    """Names as DDP gives them (the real one needs a process group)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = llama()
    expected = [name for name, _ in named_weights(plain)]
    assert [name for name, _ in named_weights(Wrapper(plain))] == expected
    assert [name for name, _ in named_weights(torch.compile(plain))] == expected  # type: ignore[arg-type]
    plain.model.layers[1] = checkpoint_wrapper(torch.compile(plain.model.layers[1]))  # type: ignore[assignment]
    assert [name for name, _ in named_weights(Wrapper(torch.compile(plain)))] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight", "model.layers.0.mlp.weight"),
        ("model.module.weight", "model.module.weight"),  # a model's own
        ("model.my_orig_mod.weight", "model.my_orig_mod.weight"),
    ],
)
def test_only_what_wrappers_added_is_taken_from_a_name(wrapped: str, plain: str) -> None:
    assert plain_name(wrapped) == plain


def test_two_weights_of_one_name_are_refused() -> None:
    lm = llama()
    lm.register_module("module", nn.ModuleDict({"lm_head": nn.Linear(2, 2, bias=False)}))
    with pytest.raises(ValueError, match=r"two weights called 'lm_head\.weight'"):
        list(named_weights(lm))


def test_sharded_weights_are_gathered_one_at_a_time() -> None:
    lm = llama()
    asked: list[str] = []

    class Sharded(nn.Parameter):  # stands for a DTensor parameter, which needs a process group
        def full_tensor(self) -> torch.Tensor:
            asked.append("full")
            return torch.full((16,), 7.0)

    lm.model.norm.weight = Sharded(torch.ones(8))
    weights = named_weights(lm)
    name, _ = next(weights)
    assert asked == [] and name == "model.embed_tokens.weight"
    assert torch.equal(dict(weights)["model.norm.weight"], torch.full((16,), 7.0)) and asked == ["full"]


# --- LoRA --------------------------------------------------------------------------------------------------------


def test_lora_is_merged_in_float32_cast_once_and_leaves_the_base_alone() -> None:
    pytest.importorskip("peft")
    lm = lora_model("bfloat16")
    before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    for _ in range(200):
        sent = dict(named_weights(lm))
    assert all(torch.equal(before[name], parameter) for name, parameter in lm.named_parameters())
    plain = build_tiny("0123456789", hidden_size=16, layers=2, heads=2, dtype="bfloat16").lm
    assert set(sent) == {name for name, _ in named_weights(plain)}
    for name, layer in lora_layers(lm).items():
        weight, up, down = layer.get_base_layer().weight, layer.lora_B["policy"].weight, layer.lora_A["policy"].weight
        expected = (weight.float() + layer.scaling["policy"] * (up.float() @ down.float())).bfloat16()
        assert torch.equal(sent[f"{name}.weight"], expected) and not torch.equal(expected, weight)


def test_a_surrounding_autocast_does_not_reach_the_merge() -> None:
    pytest.importorskip("peft")
    lm = lora_model()
    outside = dict(named_weights(lm))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(outside[name], tensor) for name, tensor in named_weights(lm))


# --- rounding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_weight_lies_on_its_channels_grid(bits: int) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    rounded = round_weight(weight, bits)
    levels = 2 ** (bits - 1) - 1
    for row, original in zip(rounded, weight, strict=True):
        step = original.abs().max() / levels
        assert len(row.unique()) <= 2 * levels + 1
        assert (row - original).abs().max() <= step / 2 + 1e-6
    assert torch.equal(round_weight(weight.T, bits, dim=0), rounded.T)
    assert round_weight(weight.bfloat16(), bits).dtype == torch.bfloat16


def test_four_bits_by_hand() -> None:
    assert round_weight(torch.tensor([[7.0, 3.4, -3.6, 0.4]]), 4).tolist() == [[7.0, 3.0, -4.0, 0.0]]


@pytest.mark.parametrize("tied", [True, False])
def test_only_linear_layers_below_the_head_are_rounded(tied: bool) -> None:
    lm = llama(tie_word_embeddings=tied)
    plain, rounded = dict(named_weights(lm)), dict(named_weights(lm, bits=8))
    changed = {name for name in plain if not torch.equal(plain[name], rounded[name])}
    assert changed == {name for name in plain if "_proj." in name}


def test_a_merged_weight_is_rounded_after_the_merge() -> None:
    pytest.importorskip("peft")
    lm = lora_model()
    plain, rounded = dict(named_weights(lm)), dict(named_weights(lm, bits=8))
    for name in lora_layers(lm):
        assert torch.equal(rounded[f"{name}.weight"], round_weight(plain[f"{name}.weight"], 8))
