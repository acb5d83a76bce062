"""The one optimiser: named groups of parameters, each with its own rate, decay, gradient limit and warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_rlhf.functional.schedules import learning_rate_factor
from lightning_rlhf.settings import GroupSettings, OptimizerSettings


def default_group(name: str, part: nn.Module, settings: GroupSettings) -> dict[str, Any]:
    """The optimiser group of a part's trainable parameters."""
    return {
        "name": name,
        "params": [p for p in part.parameters() if p.requires_grad],
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "clip_norm": settings.clip_norm,
        "warmup_iterations": settings.warmup_iterations,
    }


def make_optimizer(groups: Sequence[Mapping[str, Any]], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW over the groups."""
    own = [{**group, "initial_lr": group["lr"]} for group in groups]
    return torch.optim.AdamW(own, betas=settings.betas, eps=settings.eps, fused=True)


def take_settings(
    groups: Sequence[dict[str, Any]], fresh: Sequence[Mapping[str, Any]], settings: OptimizerSettings
) -> None:
    """Replace the settings that a restored optimiser's groups were saved with by the current ones."""
    for group, now in zip(groups, fresh, strict=True):
        group.update({key: value for key, value in now.items() if key not in ("params", "lr")})
        group["initial_lr"] = now["lr"]
        group["betas"], group["eps"] = settings.betas, settings.eps


def set_rates(
    groups: Sequence[dict[str, Any]],
    settings: OptimizerSettings,
    scale: float,
    *,
    progress: float,
    step: float,
    total: int,
) -> None:
    """Set each group's learning rate by the schedule.

    Args:
        groups: with ``initial_lr`` and ``warmup_iterations``.
        settings: the schedule.
        scale: factor on all learning rates.
        progress: iterations done, with a fraction.
        step: what one optimiser step adds to ``progress``.
        total: iterations of the run, where the schedule ends.
    """
    for group in groups:
        factor = learning_rate_factor(
            progress,
            step=step,
            total=total,
            warmup=group["warmup_iterations"],
            schedule=settings.schedule,
            final=settings.final_lr_fraction,
        )
        group["lr"] = group["initial_lr"] * scale * factor
