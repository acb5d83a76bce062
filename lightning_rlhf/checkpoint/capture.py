"""The state at the end of an iteration, kept so that it can still be saved while the next one generates and scores.

Weights and optimiser state do not change between two updates, so they are not copied. Everything else is small and
is copied: random states, data position, controllers, callbacks, clocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rlhf.checkpoint.files import with_items
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.module import ActorCriticModule


class Captured:
    """A checkpoint in memory that refers to the trainer's own weights and optimiser state.

    Made on every rank, and valid until the next update begins.

    Args:
        trainer: between two iterations.
    """

    def __init__(self, trainer: Trainer) -> None:
        content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        module = trainer.lightning_module
        # A tied tensor is in the state_dict under each of its names.
        shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        state = content["state_dict"]
        state = with_items(state, ((k, v if k in shared else _copy(v)) for k, v in state.items()))
        own = content.get("lightning_rlhf")
        self._content = {k: _copy(v) for k, v in content.items() if k not in _BY_REFERENCE}
        self._content |= {"state_dict": state, "optimizer_states": content["optimizer_states"]}
        if own is not None:  # its copy of the actor is overwritten only when the next update begins
            rest = {k: _copy(v) for k, v in own.items() if k != "update"}
            self._content["lightning_rlhf"] = rest | {"update": own["update"]}

    def write(self, trainer: Trainer, path: Path) -> None:
        """Write it like the strategy's checkpoints: rank 0 writes a file, or all ranks together a folder.

        Raises:
            CheckpointError: it could not be written.
        """
        trainer.strategy.save_checkpoint(self._content, path)

    @property
    def needs_all_ranks(self) -> bool:
        """Whether rank 0 cannot write it alone."""
        return any(isinstance(value, DTensor) for value in self._content["state_dict"].values())


_BY_REFERENCE = ("state_dict", "optimizer_states", "lightning_rlhf")


def can_capture(module: Any) -> bool:
    """Whether the module has an event for the beginning of an update, and its state is cheap to keep.

    It is not cheap with rollouts generated ahead: they are part of the state, and several processes would exchange
    them each time.
    """
    return isinstance(module, ActorCriticModule) and not (module.engine.ahead.lag and place()[1] > 1)


def iteration_now(module: Any) -> int:
    """Iterations that the module has done already, perhaps in an earlier fit."""
    return module.control.iteration if isinstance(module, ActorCriticModule) else 0


def weights_are_finite(trainer: Trainer) -> bool:
    """Whether all trained weights are finite on every rank."""
    parameters = [p for p in trainer.lightning_module.parameters() if p.requires_grad and p.is_floating_point()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    with torch.no_grad():
        broken = [~part.detach().isfinite().all() for part in local]
        finite = not broken or not bool(torch.stack([flag.to(broken[0].device) for flag in broken]).any())
    return trainer.strategy.reduce_boolean_decision(finite, all=True)


def _copy(value: Any) -> Any:
    """A deep copy of the value: its own containers and tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return with_items(value, ((key, _copy(item)) for key, item in value.items()))
    if type(value) in (list, tuple, set):
        return type(value)(_copy(item) for item in value)
    return value
