"""Several training processes: rows are balanced over the ranks, gradients are averaged once per minibatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rlhf.distributed.processes import gather_objects, place
from lightning_rlhf.experience import Experience
from lightning_rlhf.functional.stats import all_reduce_sum, largest_over_ranks
from lightning_rlhf.models.sharding import is_sharded

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

_Object = TypeVar("_Object")

# --- rows --------------------------------------------------------------------------------------------------------


def gather_experience(experience: Experience) -> Experience:
    """The rows of all ranks in the order of the ranks, on every rank; with one process the experience itself.

    This sends some bytes per token and field, thousands of times fewer than the gradients of one step. Minibatches are
    then cut from the whole batch: their rows do not depend on the number of ranks, and each rank gets about equally
    many tokens. Ranks may have different numbers of rows and columns.
    """
    _, world = place()
    if world == 1:
        return experience
    names = [field.name for field in fields(experience) if isinstance(getattr(experience, field.name), list)]
    lists = {name: getattr(experience, name) for name in names}
    kinds, texts = zip(*gather_objects((_kinds(experience), lists)), strict=True)
    _require_alike(kinds)
    mine = [len(experience), experience.prompt_ids.shape[1], experience.response_ids.shape[1]]
    sizes = _gather(torch.tensor(mine, device=experience.response_ids.device))
    rows = [int(size[0]) for size in sizes]
    width = {left: int(max(size[1 if left else 2] for size in sizes)) for left in (True, False)}
    changes: dict[str, Any] = {}
    for field in fields(experience):
        value = getattr(experience, field.name)
        if isinstance(value, Tensor) and value.ndim == 2:
            left = field.name.startswith("prompt_")
            missing = width[left] - value.shape[1]
            changes[field.name] = _gather_rows(
                torch.nn.functional.pad(value, (missing, 0) if left else (0, missing)), rows
            )
        elif isinstance(value, Tensor) and value.ndim == 1:
            changes[field.name] = _gather_rows(value, rows)
        elif isinstance(value, dict):
            changes[field.name] = {name: _gather_rows(value[name], rows) for name in sorted(value)}
    # A prompt's samples stay one group; groups of different ranks stay different.
    first = torch.arange(world, device=experience.group.device).repeat_interleave(torch.tensor(rows).to(sizes[0]))
    changes["group"] = changes["group"] + first * max(rows)
    changes |= {name: [text for of_rank in texts for text in of_rank[name]] for name in names}
    return replace(experience, **changes)


NEUTRAL = {"reward_override": math.nan, "is_weights": 1.0}
"""Fields that may be missing, and the equivalent value."""


def agree_on_fields(experience: Experience) -> None:
    """Fill in the fields of :data:`NEUTRAL` that only other ranks have set.

    Later steps reduce every set field over ranks. A callback that sets a field on one rank alone would otherwise make
    the ranks wait for each other forever.

    Raises:
        RuntimeError: on every rank, if fields differ otherwise.
    """
    if place()[1] == 1:
        return
    everyone = gather_objects(_kinds(experience))
    for name, value in NEUTRAL.items():
        kind = next((kinds[name] for kinds in everyone if name in kinds), None)
        if kind is None or kind[1] != "[B, R]":
            continue
        if getattr(experience, name) is None:
            dtype = getattr(torch, kind[0])
            setattr(experience, name, torch.full_like(experience.rollout_logprobs, value, dtype=dtype))
        for kinds in everyone:
            kinds.setdefault(name, kind)
    _require_alike(everyone)


def _kinds(experience: Experience) -> dict[str, tuple[str, str]]:
    """Data type and shape of every tensor that is set."""
    found: dict[str, Tensor] = {}
    for field in fields(experience):
        value = getattr(experience, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif isinstance(value, dict):
            found |= {f"{field.name}[{name!r}]": tensor for name, tensor in value.items()}
    return {
        name: (str(tensor.dtype).removeprefix("torch."), _shape(name, tensor, experience))
        for name, tensor in found.items()
    }


def _shape(name: str, tensor: Tensor, experience: Experience) -> str:
    """Shape in letters if a field may have it, as ranks have different numbers of rows and columns."""
    block, letters = (experience.prompt_mask, "P") if name.startswith("prompt_") else (experience.response_mask, "R")
    known = {block.shape: f"[B, {letters}]", block.shape[:1]: "[B]"}
    return known.get(tensor.shape, str(list(tensor.shape)))


def _require_alike(everyone: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Refuse fields that are not the same on all ranks; every rank raises the same error."""
    for name in dict.fromkeys(name for kinds in everyone for name in kinds):
        of_ranks = [" ".join(kinds.get(name, ("missing",))) for kinds in everyone]
        if len(set(of_ranks)) > 1:
            said = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(of_ranks))
            raise RuntimeError(
                f"experience.{name} is not the same on all ranks ({said}); allowed is one data type and shape, set on "
                "every rank or on none"
            )


def balanced_shares(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank, so that the largest sum of costs is small.

    The costliest first, each to the rank with the smallest sum so far (Graham 1969): at most 4/3 of the best possible.
    The same on every rank; the order within a share is that of the input.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def _gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(place()[1])]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _gather_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Rows of all ranks, concatenated; every rank pads to the largest number of rows."""
    plain = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    missing = max(rows) - len(plain)
    if missing:
        plain = torch.cat([plain, plain.new_zeros(missing, *plain.shape[1:])])
    parts = _gather(plain)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).to(tensor.dtype)


# --- forward passes ----------------------------------------------------------------------------------------------


def in_step(model: torch.nn.Module, parts: list[_Object], filler: _Object) -> list[_Object]:
    """A model's inputs, one forward pass each; for a sharded model filled up to the largest number on any rank.

    Forward and backward passes of a sharded model gather its weights from all ranks, so every rank has to run equally
    many, in the same order.

    Args:
        model: runs one pass per part.
        parts: of this rank.
        filler: appended once per missing part.
    """
    if not is_sharded(model):
        return parts
    [most] = largest_over_ranks([float(len(parts))], next(model.parameters()).device)
    return parts + [filler] * (int(most) - len(parts))


# --- gradients ---------------------------------------------------------------------------------------------------


@contextmanager
def local_gradients(module: ActorCriticModule) -> Iterator[None]:
    """Backward passes inside add to this rank's own gradients; :func:`average_gradients` follows.

    With no communication inside (a sharded model does communicate), a rank may run out of memory and start its
    minibatch again without the others.
    """
    strategy = module.trainer.strategy
    if isinstance(strategy, ParallelStrategy):
        with strategy.block_backward_sync():
            yield
    else:
        yield


def average_gradients(module: ActorCriticModule) -> None:
    """Average the gradients from :func:`local_gradients` over ranks, also if a rank has none.

    DDP communicates in backward passes only. The one here adds 0 to every gradient, and so makes DDP average them.
    FSDP2 averages the gradients of sharded weights in each backward pass, which keeps a rank's memory at its slices;
    the few gradients of other parameters are averaged here.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if isinstance(module.trainer.strategy, DDPStrategy):
        module.manual_backward(_Touch.apply(*trained))
    elif is_sharded(module.actor):
        for parameter in trained:
            if not isinstance(parameter, DTensor):
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = all_reduce_sum(mine) / place()[1]


class _Touch(torch.autograd.Function):
    """A loss of 0 that gives every parameter a gradient of 0, whatever its value (0 x inf would not be 0)."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.zeros((), dtype=torch.float32, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # One number expanded to the whole tensor: no memory.
        return tuple(torch.zeros((), dtype=d, device=v).expand(shape) for shape, d, v in ctx.parameters)
