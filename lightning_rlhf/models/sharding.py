"""Sharding over ranks with FSDP2: each rank keeps a slice of every weight, and gathers a layer's weights to compute it.

Actor, separate or shared critic and frozen reference are roots of their own, each decoder layer is a unit inside. Only
a root may be called: a module inside, called directly, would find its weights not gathered.

The standard deviations of ALP stay outside, whole on every rank. They are a few numbers that hooks inside sharded
layers read while other weights are gathered; as slices most ranks would hold none of them, and as a unit of their own
they would be gathered for every forward pass. Their gradients are averaged over ranks once per minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_rlhf.models.actor import Actor
from lightning_rlhf.models.critic import SeparateCritic
from lightning_rlhf.models.perturbation import decoder_layers
from lightning_rlhf.models.reference import FrozenReference

LAYERS_KEY = "trainer.strategy.layers"


@dataclass(frozen=True)
class Sharding:
    """How weights are sharded.

    Attributes:
        mesh: the ranks, in one dimension.
        gather_dtype: dtype in which decoder layers are gathered and computed; ``None``: their own. Embeddings, final
            norm and head keep their dtype either way: the hidden states between layers, which ALP perturbs, take their
            dtype from the embeddings. Gradients are reduced in float32.
        cpu_offload: slices of weights, gradients and the optimiser's state lie in host memory.
        layers: dotted name of the list of decoder layers in the language model, if it cannot be found automatically.
    """

    mesh: DeviceMesh
    gather_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    layers: str | None = None

    def shard(self, part: nn.Module) -> None:
        """Shard actor, critic or frozen reference in place, layer by layer; a second call changes nothing.

        Layers are moved to the mesh's device as they are sharded, so it holds one whole layer at a time.

        Raises:
            ValueError: the decoder layers cannot be found.
        """
        root = part.actor if isinstance(part, FrozenReference) else part
        if isinstance(root, FSDPModule):
            return
        if isinstance(root, Actor):
            for layer in decoder_layers(root.lm, self.layers, key=LAYERS_KEY)[1]:
                self._unit(layer, self.gather_dtype)
        elif isinstance(root, SeparateCritic):
            body: Any = root.backbone
            name = None if self.layers is None else self.layers.removeprefix(f"{body.base_model_prefix}.")
            for layer in decoder_layers(body, name, key=LAYERS_KEY)[1]:
                self._unit(layer, self.gather_dtype)
            self._unit(root.head, None)  # apart from the backbone, because it stays in float32
        self._unit(root, None)
        if isinstance(root, Actor):
            register_fsdp_forward_method(root, "hidden_states")
        # FSDP takes the first called module as the root; generation calls layers before any root.
        root._get_fsdp_state()._lazy_init()  # type: ignore[operator]

    def _unit(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """One unit of gathering.

        A unit is always resharded after its forward pass, roots too: weights that stayed gathered between scoring and
        the next backward pass would hide those restored by a rollback or a checkpoint.
        """
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        pinned = self.mesh.device_type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pinned) if self.cpu_offload else OffloadPolicy()
        fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=True)


def is_sharded(module: nn.Module) -> bool:
    """Whether any part of the module is sharded."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank for this context, so that forward passes inside communicate nothing; collective.

    For generation, where ranks take different numbers of steps. It costs the memory of the whole module in the dtype
    in which it is gathered. Does nothing without sharding.
    """
    units: list[Any] = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` distributed over the ranks like ``like``, in its own dtype: whole, or this rank's slice.

    Nothing is communicated; a whole tensor has to be the same on every rank.
    """
    if not isinstance(like, DTensor):
        return tensor
    if not isinstance(tensor, DTensor):
        tensor = distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)
    target: DTensor = torch.empty_like(like, dtype=tensor.dtype)  # type: ignore[assignment]
    target.to_local().copy_(tensor.to_local())
    return target
