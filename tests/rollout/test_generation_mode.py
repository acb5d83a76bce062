"""Generation leaves a model as it found it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lightning_rlhf.rollout import HFEngine, generation_mode


def state(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Every flag the guard may touch."""
    flags = [(name, m.training, getattr(m, "gradient_checkpointing", None)) for name, m in model.named_modules()]
    return [*flags, ("use_cache", model.config.use_cache), ("grad", torch.is_grad_enabled())]


def in_training(lm: PreTrainedModel) -> PreTrainedModel:
    """Training mode with one module that stays in evaluation mode, checkpointing on, cache off."""
    lm.train()
    lm.base_model.get_submodule(next(name for name, _ in lm.base_model.named_children())).eval()
    lm.gradient_checkpointing_enable()
    lm.config.use_cache = False
    return lm


def test_inside_is_evaluation_with_cache_and_without_gradient(lm: PreTrainedModel) -> None:
    in_training(lm)
    before = state(lm)
    with generation_mode(lm):
        assert not any(m.training or getattr(m, "gradient_checkpointing", False) for m in lm.modules())
        assert lm.config.use_cache is True
        assert not torch.is_grad_enabled()
    assert state(lm) == before


def test_flags_return_after_an_exception(lm: PreTrainedModel, make_tokenizer: Callable, make_prompts: Callable) -> None:
    in_training(lm)
    before = state(lm)
    engine = HFEngine(max_new_tokens=4)
    engine.setup(lm, make_tokenizer())

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = lm.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.generate(make_prompts([1, 2]), samples=1, max_new_tokens=4, seed=0)
    handle.remove()
    assert state(lm) == before


def test_checkpointing_and_training_mode_change_no_token(
    lm: PreTrainedModel, make_tokenizer: Callable, make_prompts: Callable
) -> None:
    engine = HFEngine()
    engine.setup(lm, make_tokenizer())
    prompts = make_prompts([1, 2, 3], [4])
    expected = engine.generate(prompts, samples=1, max_new_tokens=8, seed=0, greedy=True)
    in_training(lm)
    before = state(lm)
    found = engine.generate(prompts, samples=1, max_new_tokens=8, seed=0, greedy=True)
    assert torch.equal(found.response_ids, expected.response_ids)
    assert state(lm) == before
    assert not any(value.requires_grad for value in vars(found).values() if isinstance(value, torch.Tensor))


def test_a_wrapper_is_looked_through(llama: PreTrainedModel) -> None:
    in_training(llama)
    wrapper = nn.ModuleDict({"lm": llama})
    before = state(llama)
    with generation_mode(wrapper):
        assert llama.config.use_cache is True
        assert not llama.model.layers[0].gradient_checkpointing
    assert state(llama) == before


# --- mixed precision ---------------------------------------------------------------------------------------------


class WeightCasts(TorchDispatchMode):
    """Counts how often a tensor of the given shape is cast to bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += (kwargs or {}).get("dtype") == torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache_enabled", [False, True], ids=["as Lightning", "torch's default"])
def test_training_in_the_same_autocast_region_sees_gradients_and_new_weights(
    llama: PreTrainedModel, make_tokenizer: Callable, make_prompts: Callable, cache_enabled: bool
) -> None:
    engine = HFEngine()
    engine.setup(llama, make_tokenizer())
    prompts = make_prompts([1, 2, 3])

    def greedy() -> torch.Tensor:
        return engine.generate(prompts, samples=1, max_new_tokens=6, seed=0, greedy=True).rollout_logprobs

    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
        before = greedy()
        llama(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits.float().sum().backward()
        assert all(p.grad is not None for p in llama.parameters())
        with torch.no_grad():
            llama.lm_head.weight.mul_(2)
        assert not torch.equal(greedy(), before)


def test_no_copy_of_the_weights_stays(llama: PreTrainedModel, make_tokenizer: Callable, make_prompts: Callable) -> None:
    """A later forward with autocast's cache on must not find copies that generation made."""
    engine = HFEngine()
    engine.setup(llama, make_tokenizer())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        before = llama(input_ids=ids, use_cache=False).logits
        engine.generate(make_prompts([1, 2, 3]), samples=1, max_new_tokens=6, seed=0)
        llama.lm_head.weight.mul_(2)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            after = llama(input_ids=ids, use_cache=False).logits
    assert torch.equal(after, 2 * before)


def test_weights_are_cast_once_per_generation(
    llama: PreTrainedModel, make_tokenizer: Callable, make_prompts: Callable
) -> None:
    engine = HFEngine()
    engine.setup(llama, make_tokenizer())
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        WeightCasts(llama.lm_head.weight.shape) as casts,
    ):
        engine.generate(make_prompts([1, 2, 3]), samples=1, max_new_tokens=6, seed=0)
    assert casts.count == 1
