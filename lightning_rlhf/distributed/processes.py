"""Several processes of one run: who this one is, and what they tell one another outside of tensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Object = TypeVar("_Object")


def place() -> tuple[int, int]:
    """Rank of this process and number of processes; ``(0, 1)`` without ``torch.distributed``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(value: _Object) -> list[_Object]:
    """A small plain object of every rank, in the order of the ranks."""
    _, world = place()
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], _Object]) -> _Object:
    """Run ``work`` on every rank, each its own; an error of one is raised on all, so that none waits for it in vain.

    No rank returns before all have ended their work.

    Returns:
        What this rank's ``work`` returned.

    Raises:
        Exception: that of the first rank where there was one, with an attribute ``on_every_rank`` that is true.
    """
    if place()[1] == 1:
        return work()
    own: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        own = error
    try:
        errors = gather_objects(_portable(own))
    except Exception as broken:  # the others are not there any more
        raise own or broken from None
    for rank, first in enumerate(errors):
        if first is not None:
            raised: Any = own if own is not None and rank == place()[0] else first
            raised.on_every_rank = True
            raise raised
    return result


def _portable(error: Exception | None) -> Exception | None:
    """The error as another process can read it: some cannot be pickled, or not be built again."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error's own methods raise
        return RuntimeError(f"{type(error).__name__}: {error}")


def is_first() -> bool:
    """Whether this process speaks for all of them, before they have met."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0
