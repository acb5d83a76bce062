"""The state at the end of an iteration, kept so that it can still be saved while the next one generates and scores.

Weights and optimiser state do not change between two updates, so they are not copied. Everything else is small and
is copied: random states, data position, controllers, callbacks, clocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rlhf.checkpoint.files import CheckpointError, with_items
from lightning_rlhf.checkpoint.verification import all_finite, tensors_of
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
        live = ((name, tensor) for name, tensor in tensors_of(self._content) if not tensor.is_inference())
        self._versions = [(name, tensor, tensor._version) for name, tensor in live]

    def write(self, trainer: Trainer, path: Path) -> None:
        """Write it now, like the strategy's checkpoints: rank 0 writes a file, or all ranks together a folder.

        Raises:
            CheckpointError: it could not be written.
        """
        trainer.strategy.save_checkpoint(self._content, path)

    def on_host(self) -> dict[str, Any]:
        """A copy of all of it in host memory.

        Raises:
            CheckpointError: a tensor was changed meanwhile, so the copy may be of no single moment.
        """
        copy = _copy(self._content, {})
        changed = [name for name, tensor, version in self._versions if tensor._version != version]
        if changed:
            raise CheckpointError(
                f"{changed[0]} was changed between two updates, while a checkpoint of it was being written in the "
                "background; callbacks.checkpoint.asynchronous=false saves before anything else runs"
            )
        return copy

    @property
    def size(self) -> int:
        """Bytes of its weights and optimiser state on this rank."""
        return sum(tensor.nbytes for _, tensor in tensors_of(self._content))

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
    finite = all_finite(p for p in trainer.lightning_module.parameters() if p.requires_grad)
    return trainer.strategy.reduce_boolean_decision(finite, all=True)


def _copy(value: Any, shared: dict[Any, Tensor] | None = None) -> Any:
    """A deep copy of the value: its own containers and tensors.

    Args:
        value: tensors, numbers, strings and containers of them.
        shared: copies by their original: with it they lie in host memory, and tensors that are one stay one.
    """
    if isinstance(value, Tensor):
        return value.detach().clone() if shared is None else _on_host(value.detach(), shared)
    if isinstance(value, dict):
        return with_items(value, ((key, _copy(item, shared)) for key, item in value.items()))
    if type(value) in (list, tuple, set):
        return type(value)(_copy(item, shared) for item in value)
    return value


def _on_host(tensor: Tensor, shared: dict[Any, Tensor]) -> Tensor:
    key = tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
    if tensor.numel() == 0 or key not in shared:
        shared[key] = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    return shared[key]
