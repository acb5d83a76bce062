"""Puts a model into the state for generation and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def generation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, key-value cache on, activation checkpointing off, no gradient.

    Every module's flags are restored, also after an exception. Works on any wrapper (peft, an actor), as it changes all
    submodules and their configurations.
    """
    state = [*_flags(model, "training"), *_flags(model, "gradient_checkpointing"), *_cache_flags(model)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in state]
    try:
        for owner, name, value in state:
            setattr(owner, name, value)
        with torch.no_grad(), _weights_cast_once(model):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_Flag = tuple[Any, str, bool]
"""Owner, attribute, value while generating."""


def _flags(model: nn.Module, name: str) -> list[_Flag]:
    return [(module, name, False) for module in model.modules() if getattr(module, name, False)]


def _cache_flags(model: nn.Module) -> list[_Flag]:
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    return [(config, "use_cache", True) for config in configs.values() if hasattr(config, "use_cache")]


@contextmanager
def _weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Under autocast, keep the low-precision copies of the weights until the end of the generation.

    A surrounding autocast without cache (Lightning's) would cast every weight again at every token. Copies are dropped
    before and afterwards, as the weights change in between, and to free memory.
    """
    device = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.clear_autocast_cache()
    with torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=True):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
