"""The device layer: all calls that depend on the kind of device.

Other code uses ``tensor.device`` and never asks for the kind. PyTorch's module of that kind (``torch.cuda``,
``torch.npu``, ``torch.xpu``, ...) is reached through :func:`module_of`, by functions that these modules share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def current() -> torch.device:
    """The accelerator of this machine, without an index, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or CPU


def module_of(device: torch.device) -> Any:
    """PyTorch's module for this kind of device, such as ``torch.npu``."""
    return torch.get_device_module(device)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has instructions for products in ``dtype``; without them PyTorch converts, which is slow.

    oneDNN answers for a CPU, PyTorch's module for other devices; without an answer support is assumed.
    """
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype not in names:
        return True
    if device.type == "cpu":
        asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{names[dtype]}_supported", None)
        return asked is not None and bool(asked())
    asked = getattr(module_of(device), "is_bf16_supported", None) if dtype is torch.bfloat16 else None
    if asked is None:
        return True
    # CUDA counts conversion as support unless told not to.
    return bool(asked(including_emulation=False) if device.type == "cuda" else asked())


# --- memory ----------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Return the caching allocator's unused blocks to the device."""
    device = current()
    if device.type != "cpu":
        module_of(device).empty_cache()


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors held at once since :func:`reset_peak`; ``None`` where nothing counts them (a CPU)."""
    return module_of(device).max_memory_allocated(device) if _counts_memory(device) else None


def reset_peak(device: torch.device) -> None:
    """Let :func:`peak_bytes` count from here on."""
    if _counts_memory(device):
        module_of(device).reset_peak_memory_stats(device)


def total_bytes(device: torch.device) -> int | None:
    """Size of the device's memory; ``None`` where nothing tells it (a CPU)."""
    return module_of(device).mem_get_info(device)[1] if _counts_memory(device) else None


def _counts_memory(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps")  # Apple's module has neither a peak nor a size of its own memory


# --- reductions ------------------------------------------------------------------------------------------------------


def reduces_float64(device: torch.device) -> bool:
    """Whether ranks on such devices can all-reduce float64: Huawei's hccl refuses it and gathers it."""
    return device.type != "npu"


# --- random numbers --------------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> Tensor | None:
    """State of the device's generator, on the CPU; ``None`` for a CPU, whose generator is PyTorch's global one."""
    return None if device.type == "cpu" else module_of(device).get_rng_state(device).cpu()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Restore what :func:`rng_state` returned."""
    module_of(device).set_rng_state(state.cpu(), device)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore PyTorch's global generators, the CPU's and the current device's, after this context."""
    device = current()
    host, there = torch.get_rng_state(), rng_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if there is not None:
            set_rng_state(device, there)
