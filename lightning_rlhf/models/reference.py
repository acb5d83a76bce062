"""Reference policies: a frozen copy, or the actor itself with its adapter exchanged."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.models.actor import Actor, training_mode
from lightning_rlhf.models.weights import lora_layers

REFERENCE_ADAPTER = "reference"


class FrozenReference(nn.Module):
    """A copy of the starting policy: no gradient, always in evaluation mode."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.actor = Actor(copy.deepcopy(lm)).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> FrozenReference:
        """Stays in evaluation mode, whatever the modules around it do."""
        return super().train(False)

    @torch.no_grad()
    def logprobs(
        self, input_ids: Tensor, attention_mask: Tensor, response_length: int, temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities ``[B, R]`` float32 of the response under the reference; see :meth:`Actor.forward`."""
        return self.actor(input_ids, attention_mask, response_length, temperature=temperature).logprobs

    def fingerprint(self) -> str:
        """Hash of the reference's weights, see :func:`fingerprint`."""
        return fingerprint(self.actor)


class AdapterReference:
    """With LoRA: the actor's frozen base weights, without an adapter or with a frozen copy of the starting one.

    "Adapter off" is the starting policy only if the adapter was fresh. A policy that starts from a trained adapter
    keeps a second, frozen copy of it under the name ``reference``. It owns no module: the weights are the actor's.
    """

    def __init__(self, actor: Actor, adapter: str | None = None) -> None:
        """``adapter`` names the frozen copy; ``None`` means that no adapter is the reference."""
        self._actor = actor
        self._adapter = adapter

    @torch.no_grad()
    def logprobs(
        self, input_ids: Tensor, attention_mask: Tensor, response_length: int, temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities ``[B, R]`` float32 of the response under the reference; see :meth:`Actor.forward`."""
        with training_mode(self._actor, False), active_adapter(self._actor.lm, self._adapter):
            return self._actor(input_ids, attention_mask, response_length, temperature=temperature).logprobs

    def fingerprint(self) -> str:
        """Hash of the reference's weights (base and frozen adapter), see :func:`fingerprint`."""
        return fingerprint(self._actor, frozen_only=True)


@contextmanager
def active_adapter(lm: PreTrainedModel, name: str | None) -> Iterator[None]:
    """Switch to the adapter ``name``, or to none, without gradient; the former state is always restored."""
    layers = lora_layers(lm).values()
    before = [(layer, layer.active_adapters, layer.disable_adapters) for layer in layers]
    gradients = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    try:
        for layer in layers:
            if name is None:
                layer.enable_adapters(False)
            else:
                layer.set_adapter(name, inference_mode=True)
        yield
    finally:
        for layer, adapters, disabled in before:
            layer.set_adapter(adapters)
            layer.enable_adapters(not disabled)
        for parameter, wanted in gradients:
            parameter.requires_grad_(wanted)


def fingerprint(module: nn.Module, *, frozen_only: bool = False) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of a module's parameters, one parameter in memory at a time.

    A checkpoint stores it in place of a frozen reference and compares it on resume.

    Args:
        module: Whose parameters are hashed; the order of registration does not matter, tied ones count once.
        frozen_only: Leave out the parameters that are trained.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if frozen_only and parameter.requires_grad:
            continue
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        data = parameter.detach().cpu().contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()
