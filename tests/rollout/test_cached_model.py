"""The growing cache, and the model behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.rollout.cached_model import CachedModel, GrowingLayer


def test_a_growing_layer_returns_what_a_dynamic_layer_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowingLayer, "ROOM", 3)
    growing, dynamic = GrowingLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    for step, tokens in enumerate([4, 1, 1, 1, 1, 1, 2, 1]):
        rows = 3 if step < 4 else 2
        states = torch.randn(2, rows, 2, tokens, 5, generator=generator)
        for ours, theirs in zip(growing.update(*states), dynamic.update(*states), strict=True):
            assert torch.equal(ours, theirs)
        assert growing.get_seq_length() == dynamic.get_seq_length()
        if step == 3:
            order = torch.LongTensor([2, 0])
            growing.reorder_cache(order)
            dynamic.reorder_cache(order)


def test_a_token_does_not_copy_the_cache() -> None:
    layer = GrowingLayer()
    keys, _ = layer.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    later, _ = layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert later.data_ptr() == keys.data_ptr()


def test_sliding_windows_stay_and_agree_with_a_full_forward(
    make_tokenizer: Callable, make_prompts: Callable, rescore: Callable
) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=6,
        initializer_range=0.3,
        eos_token_id=49,
    )
    lm = MistralForCausalLM(config).eval()
    assert all(isinstance(layer, DynamicSlidingWindowLayer) for layer in CachedModel(lm).new_cache().layers)
    engine = HFEngine()
    engine.setup(lm, make_tokenizer(pad=49))
    rollout = engine.generate(make_prompts([1, 2, 3], [4, 5, 6, 7, 8]), samples=4, max_new_tokens=12, seed=0)
    assert len(set(rollout.response_lengths.tolist())) > 1
    torch.testing.assert_close(rollout.rollout_logprobs, rescore(lm, rollout), atol=1e-5, rtol=0)


def test_other_layers_grow(llama: PreTrainedModel) -> None:
    assert [type(layer) for layer in CachedModel(llama).new_cache().layers] == [GrowingLayer, GrowingLayer]


def test_a_model_without_a_cache_is_refused() -> None:
    class Stateless(nn.Module):
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(ValueError, match="Stateless: its forward takes no cache"):
        CachedModel(Stateless())  # type: ignore[arg-type]


def test_the_older_name_of_the_cache_argument_works(
    counter: nn.Module, make_tokenizer: Callable, make_prompts: Callable
) -> None:
    class Older(type(counter)):  # type: ignore[misc]
        def forward(self, input_ids, past_key_values=None, use_cache=None, attention_mask=None, return_dict=None):
            assert past_key_values is not None
            return super().forward(input_ids)

    counter.__class__ = Older
    engine = HFEngine()
    engine.setup(counter, make_tokenizer())  # type: ignore[arg-type]
    rollout = engine.generate(make_prompts([1]), samples=1, max_new_tokens=3, seed=0)
    assert rollout.response_ids.tolist() == [[2, 3, 4]]
