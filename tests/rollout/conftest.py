"""Small models with known behaviour, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_rlhf.experience import PromptBatch, Rollout, prompt_key


class MarkovLM(nn.Module):
    """A language model whose next token depends on the last one only: row ``i`` of a table holds its logits.

    ``rows_per_forward`` counts the rows of every call.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.config = LlamaConfig(
            vocab_size=len(table), hidden_size=2, num_hidden_layers=1, num_attention_heads=1, eos_token_id=None
        )
        self.generation_config = GenerationConfig()
        self.rows_per_forward: list[int] = []

    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=None, return_dict=None):
        self.rows_per_forward.append(len(input_ids))
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture
def markov() -> Callable[[Tensor], MarkovLM]:
    return MarkovLM


@pytest.fixture
def counter() -> MarkovLM:
    """Counts: token ``i`` is followed by ``i + 1``, 9 by itself."""
    follow = torch.arange(1, 11).clamp(max=9)
    return MarkovLM(20.0 * nn.functional.one_hot(follow, 10).float())


@pytest.fixture
def make_tokenizer() -> Callable[..., SimpleNamespace]:
    """The part of a tokenizer that an engine reads."""

    def make(eos: int | None = None, pad: int | None = 0) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=eos, pad_token_id=pad)

    return make


@pytest.fixture
def make_prompts() -> Callable[..., PromptBatch]:
    def make(*ids: list[int], data_pass: int = 0) -> PromptBatch:
        texts = [" ".join(map(str, row)) for row in ids]
        keys = [prompt_key(text) for text in texts]
        return PromptBatch([list(row) for row in ids], texts, keys, [{}] * len(ids), [data_pass] * len(ids))

    return make


def _llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=300,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=300,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


@pytest.fixture(params=[_llama, _gpt2], ids=["llama", "gpt2"])
def lm(request) -> PreTrainedModel:
    """A random model with rotary, and one with learned absolute positions."""
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return _llama().eval()


@pytest.fixture
def rescore() -> Callable[..., Tensor]:
    """``[B, R]`` log-probabilities by one full forward pass over prompt and response, as a trainer computes them."""

    @torch.no_grad()
    def score(lm: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        ids, mask = rollout.concatenated()
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        logits = lm(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits
        first = rollout.prompt_ids.shape[1] - 1
        logprobs = (logits[:, first:-1].float() / temperature).log_softmax(-1)
        scored = logprobs.gather(-1, rollout.response_ids.unsqueeze(-1)).squeeze(-1)
        return scored.where(rollout.response_mask, 0.0)

    return score
