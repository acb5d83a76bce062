"""Noise on the routers of a mixture of experts, and how evenly the experts are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_rlhf.functional.stats import all_reduce_sum
from lightning_rlhf.models.actor import Owned, keep_dtype
from lightning_rlhf.models.perturbation import AddNoise, Perturbation, decoder_layers

SMALLEST_SHARE = 0.01
"""An expert that is hardly used keeps at least this share of its noise, or it could never be chosen again."""
MEMORY = 0.99
"""Decay of the moving average of the utilisation, per optimiser step."""


class RouterPerturbation(nn.Module):
    """Noise on the router logits, in the passes inside :meth:`Perturbation.noise`.

    The logit of expert ``e`` becomes ``logit + sigma_e * u_e / target * z``: an expert that gets more tokens than its
    share is perturbed more, one that gets fewer less. ``u_e`` is a moving average over optimiser steps, the same on
    every rank. Routers are found through the model's own ``_can_record_outputs["router_logits"]``; their first matrix
    product is perturbed, so their code stays unchanged.

    Args:
        lm: a causal language model of transformers.
        perturbation: of its layers; its passes and its seed are used.
        init_sigma: standard deviation to start from; 0 stays 0.
        target: share of the router's probability that each expert should have; ``None``: one over their number.

    Attributes:
        log_sigma: ``[M, E]`` float32 of M routers with E experts.
        utilisation: ``[M, E]`` float32, moving average of the mean router probability of each expert.

    Raises:
        ValueError: the model names no routers, or they have different numbers of experts.
    """

    utilisation: Tensor

    def __init__(
        self, lm: Any, perturbation: Perturbation, *, init_sigma: float = 1e-5, target: float | None = None
    ) -> None:
        super().__init__()
        routers = find_routers(lm, perturbation.layers)
        self.indices = list(routers)
        experts = {_experts(router) for router in routers.values()}
        if len(experts) != 1:
            raise ValueError(
                f"module.alp.router: the routers of {type(lm).__name__} have {sorted(experts)} experts, not one number"
            )
        count = experts.pop()
        self.target = 1 / count if target is None else target
        device = perturbation.log_sigma.device
        start = math.log(init_sigma) if init_sigma > 0 else -math.inf
        self.log_sigma = nn.Parameter(torch.full((len(routers), count), start, device=device, dtype=torch.float32))
        even = torch.full((len(routers), count), 1 / count, device=device, dtype=torch.float32)
        self.register_buffer("utilisation", even)
        self._perturbation = [perturbation]  # in a list: not registered as a submodule
        self._modes: list[_FirstProduct] = []
        self._shares: dict[int, Tensor] = {}
        self._sums = torch.zeros_like(even)
        self._tokens = even.new_zeros(())
        for row, router in enumerate(routers.values()):
            router.register_forward_pre_hook(partial(self._begin, row))
            router.register_forward_hook(partial(self._end, row), always_call=True)

    def balance(self) -> Tensor:
        """``sum over routers and experts of (utilisation - target)^2`` in the last perturbed pass, with its gradient.

        The utilisation is the mean router probability over the pass's tokens, padding left out; unlike a count of
        chosen tokens it has a gradient.
        """
        if not self._shares:
            raise RuntimeError("RouterPerturbation.balance comes after a perturbed forward pass")
        shares = torch.stack([self._shares[row] for row in range(len(self.indices))])
        self._shares = {}  # a graph kept here would keep activations, and a module that holds one cannot be copied
        return (shares - self.target).square().sum()

    @torch.no_grad()
    def finish_step(self, *, learned: bool = True) -> None:
        """Add the utilisation since the last step to the average; to be called on every rank.

        Args:
            learned: false drops it, as all tokens of the minibatch were rejected.
        """
        sums, tokens = all_reduce_sum(torch.cat([self._sums.flatten(), self._tokens[None]])).split(self._sums.numel())
        if learned and tokens > 0:
            self.utilisation.lerp_((sums / tokens).view_as(self.utilisation), 1 - MEMORY)
        self._sums.zero_()
        self._tokens.zero_()

    @torch.no_grad()
    def sigmas(self) -> Tensor:
        """``[M]`` root mean square over experts of the current standard deviation."""
        return (self.log_sigma.exp() * self._scale()).square().mean(-1).sqrt()

    def _scale(self) -> Tensor:
        return (self.utilisation / self.target).clamp(min=SMALLEST_SHARE)

    def _begin(self, row: int, router: nn.Module, args: tuple) -> None:
        current = self._perturbation[0].current
        if current is not None:
            log_sigma = self.log_sigma[row] + self._scale()[row].log()
            seed = current.seed_of(f"router/{self.indices[row]}")
            mode = _FirstProduct(lambda logits: AddNoise.apply(logits, log_sigma, seed, None))
            self._modes.append(mode)
            mode.__enter__()

    def _end(self, row: int, router: nn.Module, args: tuple, output: Any) -> None:
        current = self._perturbation[0].current
        if current is None:
            return
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        if mode.product is None:
            return
        probabilities = mode.product.float().softmax(-1).flatten(0, -2)
        if current.mask is not None:
            probabilities = probabilities[current.mask.flatten()]
        shares = probabilities.mean(0)
        if self._perturbation[0].recomputing:
            return  # a checkpoint compares the tensors saved for backward, so all of the above is repeated
        self._shares[row] = shares
        with torch.no_grad():
            self._sums[row] += probabilities.sum(0)
            if row == 0:
                self._tokens += len(probabilities)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RouterPerturbation:
        kept: list[Owned] = [(self, "log_sigma", self.log_sigma), (self, "utilisation", self.utilisation)]
        module = keep_dtype(self, super()._apply, fn, recurse, kept)
        self._sums, self._tokens = (tensor.to(self.log_sigma.device) for tensor in (self._sums, self._tokens))
        return module


class _FirstProduct(TorchFunctionMode):
    """Changes the result of the first ``torch.nn.functional.linear`` that is called in this context."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change
        self.product: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and self.product is None:
            result = self.product = self._change(result)
        return result


def find_routers(lm: Any, layers: str) -> dict[int, nn.Module]:
    """The router of each decoder layer that has one, by the layer's number.

    Raises:
        ValueError: the model names no router class, or no layer holds a router.
    """
    named = getattr(lm.get_decoder(), "_can_record_outputs", None) or {}
    recorded = named.get("router_logits", [])
    recorded = recorded if isinstance(recorded, (list, tuple)) else [recorded]
    classes: tuple[Any, ...] = tuple(getattr(entry, "target_class", entry) for entry in recorded)
    found = {
        index: module
        for index, layer in enumerate(decoder_layers(lm, layers)[1])
        for module in layer.modules()
        if classes and isinstance(module, classes)
    }
    if not found:
        raise ValueError(
            f"module.alp.router is not allowed: {type(lm).__name__} names no routers (only a mixture of experts has "
            "them, and says which in _can_record_outputs['router_logits']); set it to null"
        )
    return found


def _experts(router: nn.Module) -> int:
    """The number of experts: the rows of the router's matrix."""
    return next(parameter.shape[0] for parameter in router.parameters() if parameter.ndim == 2)
