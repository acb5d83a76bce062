"""Several processes of one run: this one's rank, and exchange of plain objects."""

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
    """Run ``work`` on every rank; an error on one is raised on all, so that no rank waits in vain.

    No rank returns before all have ended their work.

    Returns:
        What this rank's ``work`` returned.

    Raises:
        Exception: that of the first rank that had one, with two attributes: ``on_every_rank``, which is true, and
            ``of_rank``, that rank.
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
    except Exception as broken:  # the other ranks are gone
        raise own or broken from None
    for rank, first in enumerate(errors):
        if first is not None:
            raised: Any = own if own is not None and rank == place()[0] else first
            raised.on_every_rank, raised.of_rank = True, rank
            raise raised
    return result


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that another process can read: some cannot be pickled or unpickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error's own methods raise
        return RuntimeError(f"{type(error).__name__}: {error}")


def place_at_start() -> tuple[int, int]:
    """Rank of this process and number of processes as the launcher has set them, before the process group exists."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(rank), int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))


def is_first() -> bool:
    """Whether this is rank 0, known before the process group exists."""
    return place_at_start()[0] == 0
