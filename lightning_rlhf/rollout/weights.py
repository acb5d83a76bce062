"""The weights that the trainer sends to an engine with its own model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.models.weights import checkpoint_weights, plain_name

WEIGHT_BITS = (8, 4)


def named_weights(lm: nn.Module, *, bits: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model once, under its name in a Hugging Face checkpoint.

    Wrappers are stripped from the names, LoRA is merged out of place, a tied head is sent once (as the embedding), a
    tensor sharded over ranks is gathered. Tensors are created one at a time; unchanged ones are the live weights.

    Args:
        lm: the trainer's model.
        bits: the weights sent are rounded to this many bits, see :func:`round_weight`; ``None``: not rounded.

    Raises:
        ValueError: two tensors have one name.
    """
    linear = {} if bits is None else _linear_layers(lm)
    for name, tensor in checkpoint_weights(lm, tied=False):
        if bits is not None and name in linear:
            tensor = round_weight(tensor, bits, dim=linear[name])
        yield name, tensor


@torch.no_grad()
def round_weight(weight: Tensor, bits: int, dim: int = 1) -> Tensor:
    """A matrix on a symmetric grid of ``2^bits - 1`` levels per output channel, in its own dtype.

    The step of a channel is its largest absolute weight over ``2^(bits - 1) - 1`` (absmax quantisation).

    Args:
        weight: ``[out, in]``, or ``[in, out]`` with ``dim=0``.
        bits: of one weight, at least 2.
        dim: the dimension of the inputs, over which a channel's largest weight is taken.
    """
    values = weight.float()
    step = values.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round() * step, 0.0).to(weight.dtype)


def _linear_layers(lm: nn.Module) -> dict[str, int]:
    """Weights of linear layers below the output head, and the dimension of their inputs."""
    lm = getattr(lm, "module", lm)  # DDP
    unwrapped: Any = getattr(lm, "_orig_mod", lm)  # torch.compile
    head = unwrapped.get_output_embeddings()
    found = {}
    for wrapped, module in lm.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and ".lora_" not in wrapped:
            found[plain_name(f"{wrapped}.weight").replace(".base_layer.", ".")] = 0 if isinstance(module, Conv1D) else 1
    return found
