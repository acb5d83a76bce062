"""Fused operators with a fake ``torch_npu`` that computes the same in plain PyTorch: outputs and gradients stay."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rlhf.models import build_policy, build_tiny, npu_fused
from tests.accelerators.fake_npu import Checked, fake_torch_npu
from tests.support import VOCABULARY

SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
FUSED = {"llama": (5, 2, 2), "qwen2": (5, 2, 2), "qwen3": (9, 2, 2), "mistral": (5, 2, 2)}
"""Layers with RMSNorm, SwiGLU, attention; qwen3 also normalises queries and keys."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """A fake ``torch_npu``, and tensors on the CPU taken for tensors on an NPU."""
    operators = fake_torch_npu()
    monkeypatch.setattr(npu_fused, "is_installed", lambda: True)
    monkeypatch.setattr(npu_fused, "_operators", lambda: operators)
    monkeypatch.setattr(npu_fused, "_runs_there", lambda tensor: True)
    return operators


def model(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | settings)).to(dtype)
    for name, parameter in lm.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    return lm


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 9 tokens, the second with 4 columns of padding on its left."""
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


def forward_and_backward(lm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, mask = batch()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    lm.zero_grad()
    logits = lm(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
    logits.float().log_softmax(-1)[:, 3].sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}


@pytest.mark.parametrize("kind", FUSED)
def test_fake_operators_give_the_unfused_outputs_and_gradients(fake: Checked, kind: str) -> None:
    lm = model(kind)
    logits, gradients = forward_and_backward(lm)
    names = list(lm.state_dict())
    assert tuple(npu_fused.fuse(lm).values()) == FUSED[kind]
    fake.calls.clear()
    fused_logits, fused_gradients = forward_and_backward(lm)
    assert tuple(fake.calls[name] for name in ("npu_rms_norm", "npu_swiglu", "npu_fusion_attention")) == FUSED[kind]
    assert torch.allclose(fused_logits, logits, atol=2e-6, rtol=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(fused_gradients[name], gradient, atol=2e-6, rtol=1e-4), name
    assert list(lm.state_dict()) == names


def test_fake_operators_follow_a_sliding_window(fake: Checked) -> None:
    lm = model("mistral", sliding_window=3)
    logits, _ = forward_and_backward(lm)
    npu_fused.fuse(lm)
    assert torch.allclose(forward_and_backward(lm)[0], logits, atol=2e-6, rtol=1e-5)


def test_fake_operators_in_bfloat16_stay_within_its_rounding(fake: Checked) -> None:
    lm = model("llama", torch.bfloat16)
    logits, _ = forward_and_backward(lm)
    npu_fused.fuse(lm)
    fused = forward_and_backward(lm)[0]
    assert fused.dtype == torch.bfloat16 and (fused - logits).abs().max() <= 0.02 * logits.abs().max()


def test_fake_operators_take_one_dtype_where_weights_are_wider_than_states(fake: Checked) -> None:
    """Under autocast states are bfloat16 and weights float32; the fake refuses two dtypes."""
    lm = model("llama")
    norm = lm.model.norm
    x = torch.randn(1, 2, 32, dtype=torch.bfloat16)
    expected = norm(x)
    npu_fused.fuse(lm)
    assert norm(x).dtype == expected.dtype == torch.float32
    assert torch.allclose(norm(x), expected, atol=0.02, rtol=0.02)


def test_fused_layers_compute_as_before_on_another_device(fake: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model("llama")
    logits, _ = forward_and_backward(lm)
    npu_fused.fuse(lm)
    monkeypatch.setattr(npu_fused, "_runs_there", lambda tensor: tensor.device.type == "npu")
    fake.calls.clear()
    assert torch.equal(forward_and_backward(lm)[0], logits)
    assert not fake.calls


def test_fake_operators_are_left_out_while_a_cache_is_decoded(fake: Checked) -> None:
    lm = model("llama").eval()
    ids, mask = batch()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = lm.generate(ids, attention_mask=mask, **options)
    npu_fused.fuse(lm)
    fake.calls.clear()
    assert torch.equal(lm.generate(ids, attention_mask=mask, **options), expected)
    assert fake.calls["npu_fusion_attention"] == 2, "the prompts in two layers, not the three tokens after"


def test_similar_layers_with_another_formula_are_not_fused(fake: Checked) -> None:
    """Gemma 2: norms that multiply by 1 + weight, GELU in place of SiLU, and soft-capped scores."""
    lm = model("gemma2", attn_logit_softcapping=20.0)
    before = lm.config._attn_implementation
    with pytest.raises(ValueError, match=r"npu_fused = True is not allowed: Gemma2ForCausalLM has no RMSNorm"):
        npu_fused.fuse(lm)
    assert lm.config._attn_implementation == before
    assert not any(type(layer).__name__.startswith("NPU") for layer in lm.modules())


def test_a_model_without_such_layers_keeps_what_can_be_fused(fake: Checked) -> None:
    lm = AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    assert npu_fused.fuse(lm) == {"rms_norm": 0, "swiglu": 0, "attention": 2}


def test_without_torch_npu_it_is_refused() -> None:
    if npu_fused.is_installed():
        pytest.skip("torch-npu is installed")
    tiny = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2, max_positions=64)
    with pytest.raises(ValueError, match=r"policy\.npu_fused = True is not allowed: .* torch-npu, which is not"):
        build_policy(tiny, npu_fused=True)


def test_fake_operators_reach_actor_critic_and_reference(fake: Checked, tmp_path: Path) -> None:
    tiny = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2, max_positions=64)
    policy = build_policy(tiny, npu_fused=True, critic="separate")
    for part in (policy.actor, policy.critic, policy.reference):
        kinds = [type(layer).__name__ for layer in part.modules()]
        assert kinds.count("NPULlamaRMSNorm") == 3 and kinds.count("NPULlamaMLP") == 1
    again = copy.deepcopy(policy.actor)
    assert type(again.lm.model.norm).__name__ == "NPULlamaRMSNorm"
    policy.actor.save_pretrained(tmp_path, policy.tokenizer)
    assert "npu" not in json.dumps(json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))).lower()


def test_arguments_that_the_operator_does_not_have_are_refused(fake: Checked) -> None:
    q = torch.randn(1, 2, 3, 4)
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="uses softcap, unknown to the operator"):
        npu_fused.attention(torch.nn.Identity(), q, q, q, seen, softcap=20.0)
    for mask in (None, seen.float()):
        with pytest.raises(ValueError, match="uses a mask of its own"):
            npu_fused.attention(torch.nn.Identity(), q, q, q, mask)
