"""Out of memory: recognise it, free what the failed attempt held, and measure how full the device is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_rlhf.accelerators import device as device_layer

if TYPE_CHECKING:
    from lightning_rlhf.control import Control

_Result = TypeVar("_Result")


class OutOfMemory(RuntimeError):
    """Out of memory where smaller pieces of work are impossible; the message says what was tried."""


@runtime_checkable
class MemoryPolicy(Protocol):
    """The interface of a callback that the update and generation ask when memory runs out."""

    def after_update_oom(self, control: Control, tokens: int, error: str) -> None:
        """Lower the knob ``micro_batch_tokens``; ``tokens`` is the size of the largest piece that was tried."""

    def after_rollout_oom(self, control: Control, prompts: int, error: str) -> None:
        """Generate in smaller parts from here on; ``prompts`` prompts at once did not fit."""

    @property
    def prompts_at_once(self) -> int | None:
        """How many prompts may be generated together; ``None`` for no limit."""


def memory_policy(trainer: Any) -> MemoryPolicy | None:
    """The trainer's first callback with this interface; ``None``: running out of memory ends the run."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, MemoryPolicy)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is memory running out on a GPU, an NPU or the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or is_oom_error(error) or "NPU out of memory" in str(error)


def attempt(work: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """The result of ``work``, or ``None`` and the first line of the message if memory ran out.

    On return the exception and its traceback are gone, and so are the tensors in the frames that it passed through. A
    retry inside the ``except`` block would still find them in memory.

    Raises:
        Exception: whatever else ``work`` raises.
    """
    try:
        return work(), None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0]


def free_memory() -> None:
    """Collect garbage and return the caching allocator's unused blocks to the device."""
    gc.collect()
    device_layer.empty_cache()


def peak_memory_share(device: torch.device) -> float | None:
    """Largest share of the device's memory that tensors held since the peak was last reset; ``None`` on a CPU.

    Counts tensors only: the memory that the allocator reserves never shrinks by itself.
    """
    peak, total = device_layer.peak_bytes(device), device_layer.total_bytes(device)
    return None if peak is None or total is None else peak / total
