"""Tiny random models of several architectures, and one padded batch to score with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 50
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_TOKENS}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_TOKENS,
}
_MPT: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "logit_scale": "inv_sqrt_d_model",
}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **changes: LlamaConfig(**_LLAMA | changes),
    "qwen2": lambda **changes: Qwen2Config(**_LLAMA | changes),
    "qwen3": lambda **changes: Qwen3Config(**_LLAMA | {"head_dim": 8} | changes),
    "mistral": lambda **changes: MistralConfig(**_LLAMA | {"sliding_window": 4} | changes),
    "gemma2": lambda **changes: Gemma2Config(
        **_LLAMA | {"head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 4} | changes
    ),
    "cohere": lambda **changes: CohereConfig(**_LLAMA | {"logit_scale": 0.5} | changes),
    "granite": lambda **changes: GraniteConfig(**_LLAMA | {"logits_scaling": 2.0} | changes),
    "gpt2": lambda **changes: GPT2Config(**_GPT | changes),
    "gptj": lambda **changes: GPTJConfig(**_GPT | {"rotary_dim": 4} | changes),
    "mpt": lambda **changes: MptConfig(**_MPT | _TOKENS | changes),
    "opt": lambda **changes: OPTConfig(**_OPT | {"max_position_embeddings": 64} | _TOKENS | changes),
}


@dataclass
class Batch:
    """Two rows: one fills all columns, one has two columns of padding on the left and one on the right."""

    input_ids: Tensor
    attention_mask: Tensor
    response_length: int

    @property
    def response_mask(self) -> Tensor:
        return self.attention_mask[:, -self.response_length :]


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., PreTrainedModel]:
    """``make_lm("gpt2", seed=1, tie_word_embeddings=False)``: a random model whose logits spread over several nats."""

    def make(architecture: str = "llama", *, seed: int = 0, **changes: object) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            lm = AutoModelForCausalLM.from_config(CONFIGS[architecture](**changes))
            with torch.no_grad():
                for parameter in lm.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.2)
                    elif parameter.abs().max() == 0:  # biases start at zero
                        parameter.normal_(std=0.1)
        return lm.eval()

    return make


@pytest.fixture(scope="session")
def batch() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :2] = False
    mask[1, -1:] = False
    ids[~mask] = 0
    return Batch(ids, mask, response_length=5)
