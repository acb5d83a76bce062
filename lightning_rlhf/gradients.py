"""Gradient norms and clipping of named parameter groups, also with a float16 loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlhf.models.weights import whole

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule


def gradient_norms(optimizer: Any) -> dict[str, Tensor]:
    """Global L2 norm of each named parameter group's gradients, not unscaled under float16.

    Equal on every rank, also for sharded gradients.
    """
    norms: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        device = group["params"][0].device
        none = torch.zeros((), dtype=torch.float32, device=device)
        norms[group["name"]] = whole(torch.nn.utils.get_total_norm(gradients)) if gradients else none
    return norms


def clip_gradients(optimizer: Any, norms: dict[str, Tensor], scale: float) -> None:
    """Clip each group's gradients to its own ``clip_norm``; ``None`` leaves them unchanged.

    Under float16 the gradients are still multiplied by the loss scale, so the limit is scaled, too; the precision
    plugin removes the scale just before the step.
    """
    for group in optimizer.param_groups:
        if group["clip_norm"] is not None:
            torch.nn.utils.clip_grads_with_norm_(group["params"], group["clip_norm"] * scale, norms[group["name"]])


def loss_scale(module: ActorCriticModule) -> float:
    """The float16 loss scale in force; 1 in every other precision."""
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
