"""Learnable Gaussian noise on the hidden states of a decoder, in chosen forward passes.

Adaptive layerwise perturbation (ALP, arXiv 2603.19470): the input ``h`` of decoder layer ``l`` becomes
``h + sigma_l * z`` with ``z ~ N(0, 1)``. The standard deviations are parameters, kept as logarithms so that they stay
positive. Outside :meth:`Perturbation.noise` the model is the plain model, in training mode, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_rlhf.experience import sample_seed
from lightning_rlhf.models.actor import keep_dtype

Granularity = Literal["layer", "channel"]
BITS = (4, 8)


# --- the noise -------------------------------------------------------------------------------------------------------


def draw_noise(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Standard normal noise in float32, a function of its arguments alone; no other random stream is touched."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def fake_quantise(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded to the grid of a symmetric ``bits``-bit quantiser, one scale per vector of the last dimension."""
    limit = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny).div_(limit)
    return (x / scale).round_().mul_(scale)


class AddNoise(torch.autograd.Function):
    """``quantise(hidden + exp(log_sigma) * z)``; for the backward pass ``z`` is drawn again, not kept.

    ``dL/dlog_sigma = sigma * sum(dL/dy * z)``; ``dL/dhidden = dL/dy``, straight through the rounding (Bengio et al.
    2013, arXiv 1308.3432). The sum is done in float32 at least and rounded once to the dtype of ``hidden``.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_sigma: Tensor, seed: int, bits: int | None) -> Tensor:
        """``hidden [..., H]``, ``log_sigma`` a scalar or ``[H]``."""
        ctx.save_for_backward(log_sigma)
        ctx.seed, ctx.shape, ctx.device = seed, hidden.shape, hidden.device
        ctx.wide = torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), log_sigma.dtype)
        noisy = draw_noise(hidden.shape, seed, hidden.device).to(ctx.wide).mul_(log_sigma.exp()).add_(hidden)
        return (noisy if bits is None else fake_quantise(noisy, bits)).to(hidden.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_log_sigma = None
        if ctx.needs_input_grad[1]:
            (log_sigma,) = ctx.saved_tensors
            product = draw_noise(ctx.shape, ctx.seed, ctx.device).to(ctx.wide).mul_(grad)
            total = product.sum() if log_sigma.ndim == 0 else product.flatten(0, -2).sum(0)
            grad_log_sigma = (total * log_sigma.exp()).to(log_sigma.dtype)
        return grad if ctx.needs_input_grad[0] else None, grad_log_sigma, None, None


@torch.no_grad()
def clamp_sigma_(log_sigma: Tensor, low: float, high: float) -> None:
    """Keep every sigma in ``[low, high]``; one that is 0 stays 0."""
    bounded = log_sigma.clamp(math.log(low), math.log(high))
    log_sigma.copy_(torch.where(log_sigma.isneginf(), log_sigma, bounded))


@dataclass(frozen=True)
class NoisePass:
    """Everything that one forward pass's noise depends on, kept until its activations are recomputed."""

    seed: int
    step: int
    part: int
    rank: int
    rows: tuple[Tensor, ...]
    """``log_sigma`` of each perturbed layer, gathered once for the whole pass."""
    mask: Tensor | None
    """``[B, T]`` bool, true on tokens."""

    def seed_of(self, place: str) -> int:
        """The seed of one place in the model, for instance ``layer/3``."""
        return sample_seed(self.seed, f"noise/{place}/{self.rank}", self.step, self.part)


# --- the parameters --------------------------------------------------------------------------------------------------


class Perturbation(nn.Module):
    """The standard deviations of all perturbed layers, and the hooks that apply them.

    Args:
        lm: a causal language model of transformers; gets hooks, and is not kept.
        init_sigma: standard deviation to start from; 0 stays 0.
        granularity: ``layer``: one number per layer; ``channel``: one per layer and hidden unit.
        layers: dotted name of the list of decoder layers, if it cannot be found automatically.
        layer_range: first and last layer that are perturbed, counted from 0; ``None``: all.
        bits: 8 or 4: hidden states are rounded to a grid of that many bits after the noise. ``None``: not.
        seed: of the noise.

    Attributes:
        log_sigma: ``[L]`` or ``[L, H]`` float32, whatever the precision of the model.
        indices: the number of each perturbed layer in the model.
        layers: dotted name of the list of layers.

    Raises:
        ValueError: the layers cannot be found, or a value is not allowed.
    """

    def __init__(
        self,
        lm: Any,
        *,
        init_sigma: float = 1e-4,
        granularity: Granularity = "layer",
        layers: str | None = None,
        layer_range: tuple[int, int] | None = None,
        bits: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if granularity not in get_args(Granularity):
            raise ValueError(f"granularity = {granularity!r} is not allowed: {' or '.join(get_args(Granularity))}")
        if bits is not None and bits not in BITS:
            raise ValueError(f"bits = {bits!r} is not allowed: 8, 4 or None")
        self.layers, found = decoder_layers(lm, layers)
        first, last = (0, len(found) - 1) if layer_range is None else layer_range
        if not 0 <= first <= last < len(found):
            allowed = f"two numbers from 0 to {len(found) - 1}, the lower one first"
            raise ValueError(f"module.alp.layer_range = {list((first, last))} is not allowed: {allowed}")
        self.indices, self.bits, self.seed = list(range(first, last + 1)), bits, seed
        width = lm.config.get_text_config().hidden_size
        shape = (len(self.indices), width) if granularity == "channel" else (len(self.indices),)
        device = next(lm.parameters()).device
        start = math.log(init_sigma) if init_sigma > 0 else -math.inf
        self.log_sigma = nn.Parameter(torch.full(shape, start, dtype=torch.float32, device=device))
        self._pass: NoisePass | None = None
        self._recomputing = False
        self._handles = [
            found[index].register_forward_pre_hook(partial(self._perturb, row), with_kwargs=True)
            for row, index in enumerate(self.indices)
        ]
        restore_in_checkpoints(lm, self.checkpoint_context)

    @property
    def current(self) -> NoisePass | None:
        """The pass that runs with noise, also while recomputed; ``None`` outside."""
        return self._pass

    @property
    def recomputing(self) -> bool:
        """Whether activation checkpointing is running a part of an earlier pass again."""
        return self._recomputing

    @contextmanager
    def noise(self, *, step: int, part: int, rank: int = 0, mask: Tensor | None = None) -> Iterator[None]:
        """Perturb the forward passes inside this context.

        Equal arguments give equal noise; each layer has its own.

        Args:
            step: counts batches or optimiser steps.
            part: counts forward passes within the step.
            rank: of the process.
            mask: ``[B, T]`` bool, true on tokens.
        """
        if self._pass is not None:
            raise RuntimeError("Perturbation.noise cannot be nested: one forward pass has one noise")
        self._pass = NoisePass(self.seed, step, part, rank, self.log_sigma.unbind(), mask)
        try:
            yield
        finally:
            self._pass = None

    @torch.no_grad()
    def sigmas(self) -> Tensor:
        """``[L]`` float32: the standard deviation of each layer, root mean square over hidden units."""
        sigma = self.log_sigma.exp()
        return sigma if sigma.ndim == 1 else sigma.square().mean(-1).sqrt()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def checkpoint_context(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """``context_fn`` of ``torch.utils.checkpoint``: a recomputed layer gets its first noise again."""
        return nullcontext(), _Resumed(self, self._pass)

    def _perturb(self, row: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        current = self._pass
        if current is None:
            self._refuse_unknown_recomputation(layer)
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        noisy = AddNoise.apply(hidden, current.rows[row], current.seed_of(f"layer/{self.indices[row]}"), self.bits)
        return ((noisy, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": noisy})

    def _refuse_unknown_recomputation(self, layer: nn.Module) -> None:
        """Otherwise a perturbed layer would be recomputed without noise, with silently wrong gradients."""
        if torch._C._current_graph_task_id() != -1 and not self._recomputing:
            raise RuntimeError(
                f"{type(layer).__name__} is recomputed in the backward pass by a checkpoint that does not restore its "
                "noise: use model.policy.activation_checkpointing, or give torch.utils.checkpoint "
                "context_fn=perturbation.checkpoint_context"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Perturbation:
        # A learning step of 5e-4 on a logarithm near -9 is lost in bfloat16.
        return keep_dtype(self, super()._apply, fn, recurse, [(self, "log_sigma", self.log_sigma)])


class _Resumed(AbstractContextManager):
    """Restores an earlier pass; entered once per recomputation, so possibly several times."""

    def __init__(self, perturbation: Perturbation, resumed: NoisePass | None) -> None:
        self._perturbation, self._resumed = perturbation, resumed

    def __enter__(self) -> None:
        owner = self._perturbation
        self._before = owner._pass, owner._recomputing
        owner._pass, owner._recomputing = self._resumed, True

    def __exit__(self, *error: object) -> None:
        self._perturbation._pass, self._perturbation._recomputing = self._before


# --- the model -------------------------------------------------------------------------------------------------------


def decoder_layers(lm: Any, name: str | None = None, *, key: str = "module.alp.layers") -> tuple[str, list[nn.Module]]:
    """Dotted name of the list of decoder layers, and the layers.

    Found through ``get_decoder()``: the outermost list with as many modules as the configuration has hidden layers.

    Args:
        lm: a causal language model of transformers, or its backbone.
        name: of the list, for a model where this rule does not find it.
        key: of ``name`` in the configuration, for the error.

    Raises:
        ValueError: no list fits; the message says how to name one and which lists exist.
    """
    lists = {path: module for path, module in lm.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    if name is not None:
        if name not in lists:
            raise _no_layers(lm, name, key, lists)
        return name, list(lists[name])
    decoder = lm.get_decoder()
    count = getattr(lm.config.get_text_config(), "num_hidden_layers", None)
    inside = {id(module) for module in decoder.modules()}
    for path, module in lists.items():  # outer modules come before inner ones
        if id(module) in inside and len(module) == count:
            return path, list(module)
    raise _no_layers(lm, name, key, lists)


def _no_layers(lm: Any, name: str | None, key: str, lists: dict[str, nn.ModuleList]) -> ValueError:
    there = ", ".join(f"{path} ({len(module)} modules)" for path, module in lists.items()) or "none"
    wanted = "null" if name is None else repr(name)
    return ValueError(
        f"{key} = {wanted} is not allowed: it does not lead to the decoder layers of {type(lm).__name__}. "
        f"Name the list that holds them, as in layers: model.decoder.blocks; its lists: {there}"
    )


def restore_in_checkpoints(lm: nn.Module, context_fn: Callable[[], Any]) -> None:
    """Pass ``context_fn`` to the checkpoint function of every module that recomputes its activations."""
    for module in lm.modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None:
            module._gradient_checkpointing_func = partial(function, context_fn=context_fn)  # type: ignore[assignment]
