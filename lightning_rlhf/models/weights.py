"""A model's weights as a Hugging Face checkpoint holds them: no wrappers in their names, LoRA merged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

POLICY_ADAPTER = "policy"

_WRAPPERS = re.compile(r"^module\.|(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
"""Parts of names that DDP, FSDP, torch.compile and activation checkpointing add."""


def plain_name(name: str) -> str:
    """A parameter's or module's name without the parts that wrappers add."""
    while (stripped := _WRAPPERS.sub("", name)) != name:
        name = stripped
    return name


def lora_layers(lm: nn.Module) -> dict[str, Any]:
    """The peft LoRA layers of a model by name; empty without LoRA (peft is not imported then)."""
    if not any(hasattr(module, "peft_config") for module in lm.modules()):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def merged_weight(layer: Any, adapter: str = POLICY_ADAPTER) -> Tensor:
    """``W + scaling * B @ A`` of one LoRA layer, as a new tensor: computed in float32, cast once to W's dtype."""
    base, weight = layer.get_base_layer(), whole(layer.get_base_layer().weight)
    up, down = whole(layer.lora_B[adapter].weight), whole(layer.lora_A[adapter].weight)
    with torch.autocast(weight.device.type, enabled=False):  # it would multiply in low precision
        delta = layer.scaling[adapter] * (up.float() @ down.float())
    if isinstance(base, Conv1D):  # GPT-2 keeps its weights transposed
        delta = delta.T
    return (weight.float() + delta).to(weight.dtype)


def whole(tensor: Tensor) -> Tensor:
    """The tensor without its graph; a sharded one is gathered, for which every rank must call this."""
    full = getattr(tensor, "full_tensor", None)  # DTensor, recognised without an import
    return tensor.detach() if full is None else full().detach()


@torch.no_grad()
def checkpoint_weights(lm: nn.Module, *, tied: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors one at a time, so that sharded and merged weights never lie in memory all at once.

    Without LoRA and sharding these are the live weights, not copies. LoRA is merged out of place: the product is
    added in float32 and cast once, and neither base weights nor adapter change.

    Args:
        lm: the model, wrapped or not.
        tied: a tensor that has several names (a head tied to the embedding) comes under each of them; otherwise
            once, under its first.

    Raises:
        ValueError: two tensors have one name once wrappers are stripped.
    """
    layers = {plain_name(name): layer for name, layer in lora_layers(lm).items()}
    names: set[str] = set()
    seen: set[int] = set()
    for wrapped, tensor in lm.state_dict(keep_vars=True).items():
        name = plain_name(wrapped)
        if ".lora_" in name or (not tied and id(tensor) in seen):
            continue
        seen.add(id(tensor))
        owner, _, leaf = name.rpartition(".base_layer.")
        name = f"{owner}.{leaf}" if owner in layers else name
        if name in names:
            raise ValueError(f"the model has two weights called {name!r} (one of them is {wrapped!r})")
        names.add(name)
        yield name, merged_weight(layers[owner]) if owner in layers and leaf == "weight" else whole(tensor)
