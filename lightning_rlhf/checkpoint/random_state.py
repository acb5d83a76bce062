"""Random number generators in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.accelerators.device import rng_state, set_rng_state
from lightning_rlhf.distributed.processes import gather_objects


class RNGState(Callback):
    """Saves the random number generators of every rank and restores them when training resumes.

    Generators of Python, NumPy, PyTorch on CPU and on the rank's device; restored before the first batch is fetched.
    """

    _pending: list[dict[str, Any]] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng_per_rank"] = gather_objects(_rng_state(pl_module.device))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pending = checkpoint.get("rng_per_rank")
        if self._pending is None:
            rank_zero_warn("the checkpoint holds no random number state: the resumed run draws other random numbers")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states, self._pending = self._pending, None
        if states is None:
            return
        if len(states) == trainer.world_size:
            _restore_rng(states[trainer.global_rank], pl_module.device)
        else:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} processes, this run has {trainer.world_size}: random "
                "number states are not restored, the resumed run draws other random numbers"
            )


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy, PyTorch on CPU and on ``device`` after this context."""
    state = _rng_state(device)
    try:
        yield
    finally:
        _restore_rng(state, device)


def _rng_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    state = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}
    return state | {"device": rng_state(device), "device_type": device.type}


def _restore_rng(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state.get("device") is not None and device.type == state["device_type"]:  # useless for another device type
        set_rng_state(device, state["device"])
