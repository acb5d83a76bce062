"""Lightning strategies for several devices, with the settings that suit the update of this package."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning import Trainer
from lightning.pytorch import strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rlhf.checkpoint.files import with_items
from lightning_rlhf.checkpoint.shards import read_checkpoint, write_folder
from lightning_rlhf.models.sharding import Sharding, is_sharded, placed
from lightning_rlhf.models.weights import whole
from lightning_rlhf.settings import SettingError

CheckpointKind = Literal["sharded", "full"]
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""float16 needs a loss scale, whose overflow check would see one rank's slices only."""


class DDPStrategy(strategies.DDPStrategy):
    """A whole copy of the model on every device (DistributedDataParallel).

    Gradients are views of the communication buffers, which saves a copy of them.

    Args:
        process_group_backend: of ``torch.distributed``; ``None`` is what PyTorch has for the device (nccl, gloo).
        timeout_seconds: after which a process that waits for another gives up.

    Raises:
        SettingError: a setting is out of range.
    """

    def __init__(self, *, process_group_backend: str | None = None, timeout_seconds: float = 1800) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=process_group_timeout(timeout_seconds),
            gradient_as_bucket_view=True,
        )


class FSDP2Strategy(strategies.ModelParallelStrategy):
    """Weights, gradients and the optimiser's state are sharded over all ranks; each rank has its own prompts.

    Where and how the module is sharded is :class:`~lightning_rlhf.models.sharding.Sharding`. In ``bf16-mixed`` decoder
    layers are gathered, and their products computed, in bfloat16; slices and optimiser stay in float32.

    Args:
        checkpoint: ``sharded``: a folder, to which every rank writes its slices; ``full``: one file, which rank 0
            writes after it has gathered everything in its host memory. Either is read by any number of processes.
        cpu_offload: slices of weights, gradients and optimiser state are kept in host memory; the step runs on the CPU.
        layers: dotted name of the list of decoder layers, as ``model.layers``; ``None`` finds it.
        process_group_backend: of ``torch.distributed``; ``None`` is what PyTorch has for the device (nccl, gloo).
        timeout_seconds: after which a rank that waits for another gives up.

    Raises:
        SettingError: a value is not allowed.
    """

    def __init__(
        self,
        *,
        checkpoint: CheckpointKind = "sharded",
        cpu_offload: bool = False,
        layers: str | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
    ) -> None:
        if checkpoint not in get_args(CheckpointKind):
            raise SettingError("trainer.strategy.checkpoint", checkpoint, " or ".join(get_args(CheckpointKind)))
        super().__init__(
            data_parallel_size=1,  # all ranks, see _setup_distributed; Lightning's "auto" would be tensor parallel
            tensor_parallel_size=1,
            save_distributed_checkpoint=checkpoint == "sharded",
            process_group_backend=process_group_backend,
            timeout=process_group_timeout(timeout_seconds),
        )
        self.cpu_offload, self.layers = cpu_offload, layers

    @property
    def sharding(self) -> Sharding:
        """How the module shards its parts in ``configure_model``."""
        layers = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        return Sharding(self.device_mesh["data_parallel"], layers, self.cpu_offload, self.layers)

    # --- setting up --------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            raise SettingError("trainer.precision", precision, f"with FSDP2 one of {', '.join(PRECISIONS)}")
        super().setup_environment()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size = self.world_size

    def setup(self, trainer: Trainer) -> None:
        """As Lightning's, without its passes over the weights: ``configure_model`` gave them precision and device."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move the parts that are not sharded; slices are on their device already."""
        assert self.model is not None and self.lightning_module is not None
        if not self.cpu_offload:
            self.model.to(self.root_device)
            return
        for part in self.model.children():
            if not is_sharded(part):
                part.to(self.root_device)
        self.lightning_module._device = self.root_device  # otherwise set by ``to``, which would move the slices, too

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Names and tensors, sharded ones not gathered: the module removes entries that it does not save."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser's own ``state_dict``, as with one process, except for sharded tensors."""
        return getattr(optimizer, "optimizer", optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder or a file; called on every rank.

        Raises:
            CheckpointError: it could not be written; for a folder on every rank, for a file on rank 0.
        """
        path = Path(self.broadcast(filepath))
        if self._save_distributed_checkpoint:
            write_folder(checkpoint, path, getattr(self.checkpoint_io, "buffers", ()))
            return
        content = _collected(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a file or folder written by any number of processes; it is never unpickled unsafely."""
        return read_checkpoint(Path(self.broadcast(checkpoint_path)), self.device_mesh["data_parallel"])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        saved = checkpoint["state_dict"].items()
        state = {name: placed(tensor, own[name]) if name in own else tensor for name, tensor in saved}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {index: _placed_entries(entries, parameters[index]) for index, entries in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": state})


def _placed_entries(entries: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The optimiser's state of one parameter; moments are sharded like the parameter, counters are whole."""
    return {
        name: placed(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in entries.items()
    }


def _collected(value: Any, *, keep: bool) -> Any:
    """Gather sharded tensors one at a time (a collective operation); kept, on the CPU, if ``keep``."""
    if isinstance(value, DTensor):
        tensor = whole(value)
        return tensor.cpu() if keep else None
    if isinstance(value, dict):
        return with_items(value, ((key, _collected(item, keep=keep)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return type(value)(_collected(item, keep=keep) for item in value)
    return value


class RayDDPStrategy(DDPStrategy):
    """:class:`DDPStrategy` in workers of Ray Train: Ray sets rank, process group and device of each.

    Args:
        process_group_backend: Ray opens the process group, with this backend; ``None``: nccl or gloo.
        timeout_seconds: of the process group that Ray opens.

    Raises:
        SettingError: a setting is out of range.
    """

    def __init__(self, *, process_group_backend: str | None = None, timeout_seconds: float = 1800) -> None:
        from ray.train.lightning import RayLightningEnvironment

        super().__init__(process_group_backend=process_group_backend, timeout_seconds=timeout_seconds)
        self.cluster_environment = RayLightningEnvironment()

    @property
    def root_device(self) -> torch.device:
        """The device that Ray has given to this worker."""
        from ray.train.torch import get_device

        return get_device()


def process_group_timeout(seconds: float) -> timedelta:
    """The timeout of the process group.

    Raises:
        SettingError: it is not a positive number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise SettingError("trainer.strategy.timeout_seconds", seconds, "a number > 0")
    return timedelta(seconds=seconds)
