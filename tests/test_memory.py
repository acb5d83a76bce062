"""Out of memory: which errors count, a failed attempt is freed completely, and generation in parts."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from lightning_rlhf.control import Control
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.memory import OutOfMemory, attempt, is_out_of_memory, peak_memory_share
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.rollout.in_parts import generate_in_parts
from tests.support import prompts, tiny_module


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_what_out_of_memory_looks_like_on_each_device(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_not_swallowed() -> None:
    def work() -> None:
        raise RuntimeError("shapes differ")

    assert not is_out_of_memory(ValueError("no"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        attempt(work)


class Big:
    """Something that occupies memory."""


def test_memory_of_a_failed_attempt_is_freed_before_the_next() -> None:
    """Start with 8, room for 2: 8, 4 and 2 are tried, and no object of an earlier attempt is alive."""
    alive: list[weakref.ref] = []
    tried: list[int] = []

    def work(size: int) -> int:
        gc.collect()
        assert all(held() is None for held in alive)
        big = Big()
        alive.append(weakref.ref(big))
        tried.append(size)
        if size > 2:
            raise torch.OutOfMemoryError("out of memory (simulated)\nwith more lines")
        return size

    size, result = 8, None
    while result is None:
        result, error = attempt(partial(work, size))
        if error is not None:
            assert error == "out of memory (simulated)"
            size //= 2
    assert tried == [8, 4, 2] and result == 2


def test_a_cpu_reports_no_share_of_memory_in_use() -> None:
    assert peak_memory_share(torch.device("cpu")) is None


# --- generation ------------------------------------------------------------------------------------------------------


class Halves:
    """The interface of OOMGuard, without the callback."""

    def __init__(self) -> None:
        self.prompts_at_once: int | None = None
        self.failed: list[int] = []

    def after_update_oom(self, control: Control, tokens: int, error: str) -> None:
        raise AssertionError

    def after_rollout_oom(self, control: Control, prompts: int, error: str) -> None:
        self.failed.append(prompts)
        self.prompts_at_once = max(prompts // 2, 1)


def engine_and_prompts() -> tuple[Any, PromptBatch]:
    module = tiny_module()
    data = prompts(module)
    data.setup("fit")
    module.engine.setup(module.actor.lm, module.tokenizer)
    return module.engine, next(iter(data.train_dataloader()))


def limited(engine: HFEngine, limit: int, calls: list[int]) -> Any:
    """Generation with a simulated limit of prompts at once."""

    def generate(batch: PromptBatch) -> Rollout:
        calls.append(len(batch))
        if len(batch) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return engine.generate(batch, samples=2, max_new_tokens=6, seed=1)

    return generate


def test_parts_are_the_whole_bit_for_bit_with_a_simulated_limit() -> None:
    engine, batch = engine_and_prompts()
    whole = engine.generate(batch, samples=2, max_new_tokens=6, seed=1)
    policy, calls = Halves(), list[int]()
    joined = generate_in_parts(limited(engine, 3, calls), batch, policy, Control(), 0)
    assert calls == [8, 4, 2, 2, 2, 2] and policy.failed == [8, 4]
    for field in fields(Rollout):
        one, other = getattr(whole, field.name), getattr(joined, field.name)
        if field.name == "rollout_logprobs":
            torch.testing.assert_close(one, other)  # matrix products round by their shape
        else:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name


def test_one_prompt_that_does_not_fit_is_a_clear_error() -> None:
    engine, batch = engine_and_prompts()
    calls: list[int] = []
    with pytest.raises(OutOfMemory, match=r"simulated\): generation does not fit into memory with 1 prompts at once"):
        generate_in_parts(limited(engine, 0, calls), batch, Halves(), Control(), 0)
    assert calls == [8, 4, 2, 1]


def test_without_oom_guard_the_error_is_raised() -> None:
    engine, batch = engine_and_prompts()
    with pytest.raises(torch.OutOfMemoryError):
        generate_in_parts(limited(engine, 0, []), batch, None, Control(), 0)
