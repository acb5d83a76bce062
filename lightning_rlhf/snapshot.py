"""Copies of trained weights and optimiser state, for rollbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rlhf.control import Scope
from lightning_rlhf.models.sharding import placed


@dataclass
class Snapshot:
    """A copy of trained weights and, in two of the three scopes, of the optimiser's state.

    Attributes:
        weights: of the parameters, in the optimiser's order.
        groups: names of the parameter groups they belong to; ``None``: all groups.
        state: the optimiser's entries by parameter; ``None``: they stay as they are.
    """

    weights: list[Tensor]
    groups: list[str] | None = None
    state: dict[Tensor, dict[str, Any]] | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, scope: Scope, optimizer: Any, over: Snapshot | None = None) -> Snapshot:
        """Copy what ``scope`` needs: the actor's weights alone, or everything; reuses the memory of ``over``."""
        groups = ["actor"] if scope == "actor" else None
        parameters = _parameters(optimizer, groups)
        # A copy from a checkpoint may be on the CPU or unsharded: then make a new one, placed like the parameters.
        if over is None or not all(_lie_alike(w, p) for w, p in zip(over.weights, parameters, strict=True)):
            weights = [p.detach().clone() for p in parameters]
        else:
            weights = over.weights
            for weight, parameter in zip(weights, parameters, strict=True):
                weight.copy_(parameter)
        return cls(weights, groups, None if groups else _copy_state(_plain(optimizer).state))

    @torch.no_grad()
    def restore(self, optimizer: Any) -> None:
        """Write the copy back, bit for bit."""
        for parameter, weight in zip(_parameters(optimizer, self.groups), self.weights, strict=True):
            parameter.copy_(placed(weight, parameter))
        if self.state is not None:
            _plain(optimizer).state.clear()
            _plain(optimizer).state.update(_copy_state(self.state))


def _lie_alike(weight: Tensor, parameter: Tensor) -> bool:
    return weight.device == parameter.device and isinstance(weight, DTensor) == isinstance(parameter, DTensor)


def _plain(optimizer: Any) -> Optimizer:
    """The optimiser inside Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _parameters(optimizer: Any, groups: list[str] | None) -> list[Tensor]:
    return [p for group in optimizer.param_groups if groups is None or group["name"] in groups for p in group["params"]]


def _copy_state(state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    return {
        parameter: {name: value.clone() if isinstance(value, Tensor) else value for name, value in entries.items()}
        for parameter, entries in state.items()
    }
