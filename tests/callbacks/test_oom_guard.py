"""OOMGuard: smaller pieces, the same gradient; memory is simulated, once by a real count of live bytes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_rlhf import memory
from lightning_rlhf.callbacks import OOMGuard, RLHFCallback
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.memory import OutOfMemory
from lightning_rlhf.ppo import PPOModule
from tests.support import DecisionLog, Recorder, fit, resume_equals_whole, tiny_module

UPDATE: dict[str, Any] = {"update": {"epochs": 1, "minibatch_size": 16}}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (simulated in backward)")


class Hungry(PPOModule):
    """Memory (simulated) for ``limit`` rows; the error comes in the forward or the backward pass."""

    limit, where = 3, "forward"
    tried: list[int]

    def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
        self.tried.append(len(micro))
        if len(micro) > self.limit and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory (simulated in forward)")
        loss = super().micro_batch_loss(micro, metrics)
        return FailsInBackward.apply(loss) if len(micro) > self.limit else loss


class Gradients(RLHFCallback):
    """The gradient of every minibatch before its step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        self.seen.append(torch.cat(grads).clone())


def hungry(where: str = "forward", limit: int = 3, **blocks: Any) -> Hungry:
    module = tiny_module(cls=Hungry, **{"iterations": 1, **UPDATE, **blocks})
    module.where, module.limit, module.tried = where, limit, []  # type: ignore[assignment]
    return module  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_minibatch_is_done_again_in_smaller_pieces_with_the_same_gradient(where: str) -> None:
    plain, guarded, log = Gradients(), Gradients(), DecisionLog()
    fit(tiny_module(iterations=1, **UPDATE), [plain])
    module = hungry(where)
    trainer = fit(module, [OOMGuard(), guarded], logger=log)
    [one], [other] = plain.seen, guarded.seen
    assert (one - other).abs().max() < 1e-6
    failed = [number for number, rows in enumerate(module.tried) if rows > 3]
    assert module.tried[0] == 16 and sum(module.tried[failed[-1] + 1 :]) == 16, "all 16 rows, once"
    assert trainer.callback_metrics["stability/oom_retries"] == len(log.of("oom_retry")) >= 2
    assert f"(CUDA out of memory (simulated in {where}))" in log.of("oom_retry")[0][1]
    assert trainer.callback_metrics["ppo/updates"] == 1


def test_gradients_of_the_pieces_before_the_error_are_dropped() -> None:
    """The third of four pieces fails once: the two before it must not count twice."""

    class Once(PPOModule):
        calls = 0

        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return super().micro_batch_loss(micro, metrics)

    pieces = {"update": {**UPDATE["update"], "micro_batch_size": 4}}
    plain, guarded = Gradients(), Gradients()
    fit(tiny_module(iterations=1, **pieces), [plain])
    trainer = fit(tiny_module(cls=Once, iterations=1, **pieces), [OOMGuard(), guarded])
    assert (plain.seen[0] - guarded.seen[0]).abs().max() < 1e-6
    assert trainer.callback_metrics["ppo/ratio_mean"] == pytest.approx(1.0, abs=1e-5), "nor do their metrics"


def test_without_it_the_error_ends_the_run() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="simulated in forward"):
        fit(hungry())


def test_one_sequence_that_does_not_fit_is_a_clear_error() -> None:
    module = hungry(limit=0)
    with pytest.raises(OutOfMemory, match=r"simulated in forward\): not even one sequence of \d+ tokens fits"):
        fit(module, [OOMGuard()])
    assert module.tried[-1] == 1


def test_another_error_is_not_swallowed() -> None:
    class Wrong(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        fit(tiny_module(cls=Wrong, iterations=1), [OOMGuard()])


def test_the_size_is_remembered_and_a_larger_one_tried_after_a_while() -> None:
    """Iteration 1 fails down to 2 rows. Quiet 1, 2, 3; twice the size in iteration 5 fails again: the wait doubles."""
    log = DecisionLog()
    module, guard = hungry(iterations=6), OOMGuard(retry_after=3)
    recorder = Recorder()
    fit(module, [guard, recorder], logger=log)
    assert sorted({iteration for iteration, _ in log.of("oom_retry")}) == [1, 5]
    assert guard.wait == 6 and guard.tokens_share < 1


# --- a count of live bytes -------------------------------------------------------------------------------------------


class MemoryBudget(TorchDispatchMode):
    """Counts the bytes of living storages made under it, and raises what a GPU would beyond a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.live, self.peak = float("inf"), 0, 0
        self.seen: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen and key not in given:  # views are no new memory
                    self.seen.add(key)
                    self.live += size
                    weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.live)
        if self.live > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory (simulated): {self.live} > {self.limit} bytes")
        return out


class Counted(RLHFCallback):
    """Counts the memory of forward and backward passes, up to ``limit`` bytes."""

    def __init__(self, limit: float) -> None:
        self.limit, self.peaks = limit, []  # type: ignore[var-annotated]

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any) -> None:
        self.mode = MemoryBudget()
        self.mode.limit = self.limit
        self.mode.__enter__()

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.peaks.append(self.mode.peak)


def test_memory_is_really_free_before_the_retry_under_a_simulated_budget() -> None:
    """Half of what the whole minibatch takes: were the failed attempt still in memory, no smaller piece would fit."""
    settings: dict[str, Any] = {"iterations": 1, "max_new_tokens": 20, **UPDATE}
    plain, guarded, free = Gradients(), Gradients(), Counted(float("inf"))
    fit(tiny_module(**settings), [plain, free])
    tight = Counted(free.peaks[0] * 0.5)
    module, log = tiny_module(**settings), DecisionLog()
    fit(module, [OOMGuard(), guarded, tight], logger=log)
    assert len(log.of("oom_retry")) >= 1 and "bytes" in log.of("oom_retry")[0][1]
    assert (plain.seen[0] - guarded.seen[0]).abs().max() < 1e-6


# --- generation ------------------------------------------------------------------------------------------------------


def test_generation_that_runs_out_splits_the_prompts_and_keeps_the_samples_simulated() -> None:
    whole, split, log = Recorder(), Recorder(), DecisionLog()
    fit(tiny_module(iterations=2), [whole])
    module, guard = tiny_module(iterations=2), OOMGuard()
    generate, calls = module.engine.generate, []

    def limited(batch: PromptBatch, **how: Any) -> Rollout:
        calls.append(len(batch))
        if len(batch) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated in generation)")
        return generate(batch, **how)

    module.engine.generate = limited  # type: ignore[method-assign, assignment]
    fit(module, [guard, split], logger=log)
    assert calls == [8, 4, 4, 4, 4], "the size is remembered in iteration 2"
    for one, other in zip(whole.of("on_rollout_end"), split.of("on_rollout_end"), strict=True):
        assert torch.equal(one.response_ids, other.response_ids) and torch.equal(one.group, other.group)
    [(iteration, reason)] = log.of("oom_retry")
    assert iteration == 1 and "prompts generated at once 8 -> 4" in reason


def test_over_the_high_mark_responses_get_shorter_and_longer_again_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 tokens: -25 % is 9, again 6.75, then the floor of 6; under the low mark 8, 10.67, 12."""
    shares = iter([0.9, 0.9, 0.9, 0.9, 0.8, 0.5, 0.5, 0.5, 0.5])
    monkeypatch.setattr(memory, "peak_memory_share", lambda device: next(shares))
    lengths: list[float] = []

    class Length(RLHFCallback):
        def on_rollout_end(self, trainer: Any, module: Any, rollout: Any) -> None:
            lengths.append(module.control.value("max_new_tokens"))

    log = DecisionLog()
    trainer = fit(tiny_module(iterations=9, max_new_tokens=12), [OOMGuard(min_new_tokens=6), Length()], logger=log)
    assert lengths == [12, 9, 7, 6, 6, 6, 8, 11, 12]
    assert [iteration for iteration, _ in log.of("shorten_responses")] == [1, 2, 3]
    assert "90% of device memory in use, over 85%: at most 9 tokens" in log.of("shorten_responses")[0][1]
    assert trainer.callback_metrics["stability/length_cuts"] == 3


# --- state and settings ----------------------------------------------------------------------------------------------


def test_state_survives_a_resume(tmp_path: Path) -> None:
    [guard] = resume_equals_whole(tmp_path, lambda: [OOMGuard(retry_after=50)], lambda: hungry(iterations=4))
    assert guard.tokens_share < 1 and guard.quiet == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retry_after": 0}, r"retry_after = 0 is not allowed: a whole number >= 1"),
        ({"high": 1.0}, r"high = 1.0 is not allowed: a finite number > 0 and < 1"),
        ({"low": 0.9}, r"low = 0.9 is not allowed: at most callbacks.oom_guard.high = 0.85"),
        ({"length_step": 0}, r"length_step = 0 is not allowed"),
        ({"min_new_tokens": 0}, r"min_new_tokens = 0 is not allowed"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"callbacks.oom_guard.{message}"):
        OOMGuard(**settings)
