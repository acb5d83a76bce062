from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_rlhf.models.actor import Actor, backbone, output_head, position_ids, verify_head
from lightning_rlhf.models.loading import LoadedModel, disable_dropout
from lightning_rlhf.models.policy import build_policy
from lightning_rlhf.models.tiny import character_tokenizer
from lightning_rlhf.models.weights import lora_layers

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "cohere", "granite", "gpt2", "gptj", "mpt", "opt"]


def expected(lm: PreTrainedModel, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy ``[B, R]`` from the model's own logits, row by row and without any padding."""
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        ids = row[mask]
        logits = lm(input_ids=ids[None]).logits[0, :-1].float() / temperature
        distribution = logits.log_softmax(-1)
        chosen = distribution.gather(-1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        real = mask[-batch.response_length :]
        for values, out in ((chosen, logprobs), (entropy, entropies)):
            placed = torch.zeros(batch.response_length)
            out.append(placed.masked_scatter(real, values[-int(real.sum()) :]))
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_the_models_own(
    make_lm: Any, batch: Any, architecture: str, temperature: float
) -> None:
    lm = make_lm(architecture)
    with torch.no_grad():
        want, want_entropy = expected(lm, batch, temperature)
        got = Actor(lm)(
            batch.input_ids, batch.attention_mask, batch.response_length, temperature=temperature, entropy="detached"
        )
    mask = batch.response_mask
    assert want[mask].std() > 0.25  # random logits that say something
    torch.testing.assert_close(got.logprobs[mask], want[mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy[mask], want_entropy[mask], atol=1e-5, rtol=1e-5)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    assert got.hidden is None


class TableBody(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table[None, : input_ids.shape[1]])


class TableLM(PreTrainedModel):
    """Logits from a table by position, whatever the tokens are."""

    config_class = PreTrainedConfig
    base_model_prefix = "body"

    def __init__(self, table: Tensor) -> None:
        super().__init__(PreTrainedConfig())
        self.body = TableBody(table)
        self.lm_head = nn.Linear(table.shape[1], table.shape[1], bias=False)
        self.lm_head.weight.data = torch.eye(table.shape[1])

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_logits_at_a_position_speak_of_the_next_token() -> None:
    table = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 8.0]]).log()
    ids = torch.tensor([[2, 0, 1, 2]])
    got = Actor(TableLM(table))(ids, torch.ones_like(ids, dtype=torch.bool), 3).logprobs.exp()
    torch.testing.assert_close(got, torch.tensor([[1 / 3, 1 / 4, 1 / 5]]), atol=1e-6, rtol=0)


def test_positions_count_from_the_first_real_token() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_never_matters(make_lm: Any, batch: Any, architecture: str) -> None:
    """A row alone, and the same row with 7 columns of padding on the left and 3 on the right; gradients too."""
    lm = make_lm(architecture)
    row = batch.input_ids[:1]

    def score(left: int, right: int) -> tuple[Tensor, list[Tensor]]:
        ids = nn.functional.pad(row, (left, right), value=7)
        mask = nn.functional.pad(torch.ones_like(row, dtype=torch.bool), (left, right))
        lm.zero_grad()
        logprobs = Actor(lm)(ids, mask, batch.response_length + right).logprobs[:, : batch.response_length]
        logprobs.sum().backward()
        return logprobs.detach(), [p.grad.clone() for p in lm.parameters() if p.grad is not None]

    alone, alone_gradients = score(0, 0)
    padded, padded_gradients = score(7, 3)
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    for got, want in zip(padded_gradients, alone_gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "cohere"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_those_of_the_plain_loss(make_lm: Any, batch: Any, architecture: str, tied: bool) -> None:
    lm = make_lm(architecture, tie_word_embeddings=tied)
    weights = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(3))
    weights = weights.masked_fill(~batch.response_mask, 0.0)

    (expected(lm, batch)[0] * weights).sum().backward()
    want = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    (Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length).logprobs * weights).sum().backward()

    assert (lm.get_output_embeddings().weight is lm.get_input_embeddings().weight) == tied
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], atol=1e-4, rtol=1e-4, msg=name)


class Shapes(TorchDispatchMode):
    """Records the largest number of elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_logits_of_the_whole_batch(make_lm: Any) -> None:
    """Neither forward nor backward makes a tensor as large as ``[B, T, V]``; prompt columns cost no logits."""
    columns, vocabulary, response = 48, 1024, 8
    lm = make_lm("llama", vocab_size=vocabulary)
    ids = torch.randint(3, vocabulary, (2, columns), generator=torch.Generator().manual_seed(0))
    with Shapes() as shapes:
        out = Actor(lm)(ids, torch.ones_like(ids, dtype=torch.bool), response, entropy="gradient")
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert shapes.largest < 2 * columns * vocabulary / 2


@pytest.mark.parametrize("response_length", [0, 11, 12])
def test_a_response_needs_a_prompt_before_it(make_lm: Any, batch: Any, response_length: int) -> None:
    with pytest.raises(ValueError, match=rf"response_length = {response_length} .* 11 columns"):
        Actor(make_lm())(batch.input_ids, batch.attention_mask, response_length)


def test_no_key_value_cache_is_built(make_lm: Any, batch: Any) -> None:
    lm = make_lm()
    caches = []
    lm.model.register_forward_hook(lambda module, args, out: caches.append(out.past_key_values))
    Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length)
    assert caches == [None]


def test_hidden_states_on_request(make_lm: Any, batch: Any) -> None:
    lm = make_lm()
    with torch.no_grad():
        out = Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length, with_hidden=True)
        logits = lm.lm_head(out.hidden)
    assert out.hidden.shape == (2, batch.response_length + 1, 32)
    chosen = logits[0, :-1].log_softmax(-1).gather(-1, batch.input_ids[0, -batch.response_length :, None])[:, 0]
    torch.testing.assert_close(chosen, out.logprobs[0])


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["autocast", "true"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_bfloat16(make_lm: Any, batch: Any, mode: str, architecture: str) -> None:
    lm = make_lm(architecture)
    want = expected(lm, batch)[0].detach()
    actor = Actor(lm)
    if mode == "true":
        actor.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        got = actor(batch.input_ids, batch.attention_mask, batch.response_length, entropy="gradient")
    (got.logprobs.sum() + got.entropy.sum()).backward()
    assert got.logprobs.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lm.parameters())
    mask = batch.response_mask
    assert (got.logprobs[mask] - want[mask]).abs().max() < 0.2


def test_lower_precision_leaves_rotary_frequencies_alone(make_lm: Any) -> None:
    """Precision "bf16-true" calls ``.to`` on the module that holds the actor."""
    lm = make_lm()
    frequencies = lm.model.rotary_emb.inv_freq.clone()
    holder = nn.ModuleDict({"actor": Actor(lm)}).to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in holder.parameters())
    assert lm.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(lm.model.rotary_emb.inv_freq, frequencies)


# --- the start-up check ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_architectures_pass_the_check(make_lm: Any, architecture: str, dtype: torch.dtype) -> None:
    lm = make_lm(architecture)
    disable_dropout(lm)
    Actor(lm).to(dtype)
    verify_head(lm)


def test_the_check_leaves_modes_and_random_state_alone(make_lm: Any) -> None:
    lm = make_lm("gpt2")
    disable_dropout(lm)
    lm.train()
    lm.transformer.h[0].eval()
    modes = [module.training for module in lm.modules()]
    before = torch.get_rng_state()
    verify_head(lm)
    assert [module.training for module in lm.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in lm.parameters())


class DoubledLM(LlamaForCausalLM):
    """Does something of its own to its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


class PositionlessLM(GPT2LMHeadModel):
    """Counts positions over the padding."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.register_forward_pre_hook(self._forget, with_kwargs=True)

    @staticmethod
    def _forget(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"position_ids": None}


class NoisyLM(LlamaForCausalLM):
    """Adds noise in training mode."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(
            lambda module, args, out: out + torch.randn_like(out) if module.training else out
        )


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [
        (DoubledLM, "llama", "not head"),
        (PositionlessLM, "gpt2", "padding"),
        (NoisyLM, "llama", "training mode"),
    ],
)
def test_an_architecture_that_would_be_scored_wrongly_is_refused(
    make_lm: Any, kind: type[PreTrainedModel], architecture: str, reason: str
) -> None:
    template = make_lm(architecture)
    lm = kind(template.config)
    lm.load_state_dict(template.state_dict())
    disable_dropout(lm)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{kind.__name__} is not supported.*{reason}"):
        verify_head(lm)
    assert torch.equal(torch.get_rng_state(), before)


class CappedLM(LlamaForCausalLM):
    """Multiplies its logits by 0.5 and then caps them at 1.5."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = 1.5 * torch.tanh(0.5 * out.logits / 1.5)
        return out


def test_scale_and_soft_cap_together(make_lm: Any, batch: Any) -> None:
    template = make_lm(logit_scale=0.5, final_logit_softcapping=1.5)
    lm = CappedLM(template.config)
    lm.load_state_dict(template.state_dict())
    verify_head(lm)
    with torch.no_grad():
        want = expected(lm, batch, 0.7)[0]
        got = Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length, temperature=0.7).logprobs
    mask = batch.response_mask
    torch.testing.assert_close(got[mask], want[mask], atol=1e-5, rtol=1e-5)


def test_a_model_without_head_or_backbone_is_refused(make_lm: Any) -> None:
    body = make_lm().model
    with pytest.raises(ValueError, match="LlamaModel is not supported: no backbone"):
        backbone(body)
    with pytest.raises(ValueError, match="LlamaModel is not supported: it has no output embedding"):
        output_head(body)


# --- export ------------------------------------------------------------------------------------------------------


def logits(lm: PreTrainedModel, batch: Any) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[batch.attention_mask]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_saved_folder_loads_as_a_plain_model(
    make_lm: Any, batch: Any, tmp_path: Any, architecture: str, tied: bool, lora: dict[str, Any] | None
) -> None:
    lm = make_lm(architecture, tie_word_embeddings=tied)
    names = set(lm.state_dict())
    tokenizer = character_tokenizer("0123456789+=")
    actor = build_policy(LoadedModel(lm, tokenizer, "test"), critic="none", reference="none", lora=lora).actor
    randomise_adapter(lm)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    random_state = torch.get_rng_state()
    actor.save_pretrained(tmp_path / "model", tokenizer)
    assert torch.equal(torch.get_rng_state(), random_state)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is type(lm)
    assert set(actor.export_state_dict()) == names == set(loaded.state_dict())
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    torch.testing.assert_close(logits(loaded, batch), logits(lm, batch), atol=1e-4, rtol=1e-4)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert len(set(file.keys())) == len(names) - tied  # a tied head is not written twice
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
    text = "12+7=19"
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text


def randomise_adapter(lm: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def test_exporting_lora_never_moves_the_base_weights(make_lm: Any) -> None:
    """bfloat16, a non-zero adapter, 200 exports: the base bitwise unchanged, the product exact to one rounding."""
    lm = make_lm()
    Actor(lm).to(torch.bfloat16)
    loaded = LoadedModel(lm, character_tokenizer("01"), "test")
    lora = {"r": 2, "alpha": 6, "target_modules": ["q_proj"]}
    actor = build_policy(loaded, critic="none", reference="none", lora=lora).actor
    randomise_adapter(lm)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    for _ in range(200):
        exported = actor.export_state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
    layers = lora_layers(lm)
    assert len(layers) == 2
    for name, layer in layers.items():
        base, a, b = layer.base_layer.weight, layer.lora_A["policy"].weight, layer.lora_B["policy"].weight
        want = (base.float() + 3.0 * b.float() @ a.float()).to(torch.bfloat16)
        assert exported[f"{name}.weight"].dtype == torch.bfloat16
        assert torch.equal(exported[f"{name}.weight"], want)
        assert not torch.equal(want, base)


def test_export_without_lora_is_the_live_state(make_lm: Any) -> None:
    lm = make_lm()
    exported = Actor(lm).export_state_dict()
    assert exported.keys() == lm.state_dict().keys()
    assert all(tensor.data_ptr() == lm.state_dict()[name].data_ptr() for name, tensor in exported.items())
    assert not any(tensor.requires_grad for tensor in exported.values())
