"""The work of each rank for ``test_fsdp2.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_rlhf.callbacks import OOMGuard, RLHFCallback
from lightning_rlhf.checkpoint import shards
from lightning_rlhf.checkpoint.files import CheckpointError, verify, with_items
from lightning_rlhf.checkpoint.shards import read_checkpoint, write_folder
from lightning_rlhf.distributed.strategies import FSDP2Strategy
from lightning_rlhf.events import emit
from lightning_rlhf.experience import Experience
from lightning_rlhf.gradients import clip_gradients, gradient_norms
from lightning_rlhf.models import perturbation
from lightning_rlhf.models.weights import whole
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.train import train
from tests.support import prompts, tiny_module, tiny_policy

ROWS = 16
UPDATE: dict[str, Any] = {"epochs": 1, "minibatch_size": 5, "micro_batch_tokens": 40}
"""Minibatches of 5, 5, 5 rows and 1, of which one rank gets none; micro-batches of two or three rows."""

TEXT: dict[str, Any] = {
    "source": [{"text": f"{a}*{a}={a * a} " * 20} for a in range(9)],
    "length": 16,
    "tokens_per_step": 48,
    "coefficient": 0.3,
}
"""Three blocks of text per step: one rank has one of them twice, and it counts once."""

GRADIENTS: dict[str, dict[str, Any]] = {
    "separate critic, ALP per layer": {"policy": {}, "module": {"alp": {"init_sigma": 1e-2, "ratio": "decoupled"}}},
    "shared critic, ALP per channel, checkpointing, tied": {
        "policy": {"critic": "shared", "activation_checkpointing": True},
        "tie_embeddings": True,
        "module": {
            "alp": {"init_sigma": 1e-2, "ratio": "decoupled", "granularity": "channel"},
            "loss": {"entropy_coefficient": 0.1},
        },
    },
    "LoRA": {"policy": {"lora": {"r": 2}}, "module": {}},
    "PPO-ptx": {"policy": {"activation_checkpointing": True}, "module": {"ptx": TEXT}, "tie_embeddings": True},
    "offload": {"policy": {}, "module": {}, "strategy": {"cpu_offload": True}},
}
"""Settings under which gradients are compared with those of one process."""


class Fixed(PPOModule):
    """Trains once, on a rank's share of experience that was scored by one process."""

    experience: dict[str, Any]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.control.begin_iteration(self.control.iteration + 1)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # Ranks bring different numbers of rows.
        first = ROWS if world == 1 else ROWS // 2 - 3
        mine = torch.arange(ROWS)[:first] if rank == 0 else torch.arange(ROWS)[first:]
        emit(self, "on_experience_ready", None, None)
        self._update_loop.run(Experience(**self.experience).select(mine))


class Gradients(RLHFCallback):
    """Whole gradients and norms of every minibatch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        named = {n: whole(p.grad).clone() for n, p in module.named_parameters() if p.grad is not None}
        norms = {f"norm of {name}": torch.tensor(norm) for name, norm in stats.grad_norms.items()}
        self.seen.append(named | norms)


@contextlib.contextmanager
def same_noise_everywhere() -> Iterator[None]:
    """Noise that depends on the hidden unit alone, so that it does not depend on a row's micro-batch."""
    drawn = perturbation.draw_noise
    perturbation.draw_noise = lambda shape, seed, device: torch.linspace(-1, 1, shape[-1]).expand(shape).clone()
    try:
        yield
    finally:
        perturbation.draw_noise = drawn


def varied_module(settings: dict[str, Any], **more: Any) -> PPOModule:
    """A module whose value head and standard deviations are not constant; the same in every process."""
    tied = {"tie_embeddings": True} if settings.get("tie_embeddings") else {}
    # A step so small that all minibatches see the same weights.
    rates = {"actor": {"lr": 1e-30}, "critic": {"lr": 1e-30}}
    module: Any = tiny_module(
        policy=tiny_policy(**tied, **settings["policy"]),
        cls=Fixed,
        **rates,
        **({"update": UPDATE} | settings["module"]),
        **more,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        module.critic.head.weight.copy_(torch.randn(module.critic.head.weight.shape, generator=generator))
        if module.perturbation is not None:
            sigma = module.perturbation.log_sigma
            sigma.add_(0.3 * torch.randn(sigma.shape, generator=generator))
    return module


def trainer(strategy: Any = "auto", callbacks: list[Callback] | None = None, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", strategy=strategy, callbacks=callbacks or [], max_epochs=1, limit_train_batches=1,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def gradients_of(
    name: str, experience: dict[str, Any], strategy: Any = "auto", devices: int = 1
) -> list[dict[str, Tensor]]:
    module: Any = varied_module(GRADIENTS[name])
    seen = Gradients()
    module.experience = experience
    with same_noise_everywhere():
        trainer(strategy, [seen], devices=devices).fit(module, datamodule=prompts(module))
    return seen.seen


def small_clip(mesh: Any) -> dict[str, Any]:
    """Two shards with gradients 3 and 4."""
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(1, 2, bias=False)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(1, 1)).sum().backward()
    layer.weight.grad.to_local().fill_(3.0 + dist.get_rank())
    optimizer = torch.optim.AdamW([{"params": [layer.weight], "name": "actor", "clip_norm": 1.0}], fused=True)
    norms = gradient_norms(optimizer)
    clip_gradients(optimizer, norms, 1.0)
    optimizer.step()
    return {"norm": float(norms["actor"]), "clipped": layer.weight.grad.to_local().item()}


def failed_saves(folder: Path) -> list[str]:
    """Errors of two saves over an older one: on rank 1 the disk is full in the first, on rank 0 in the second."""
    mesh, path, errors = init_device_mesh("cpu", (2,)), folder / "iteration_000001.ckpt", []
    content = {"state_dict": {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}, "iteration": 1}
    write_folder(content, path)
    digest = shards.digest
    for broken in (1, 0):

        def full(file: Path, broken: int = broken) -> dict[str, Any]:
            if dist.get_rank() == broken:
                raise OSError(28, "No space left on device")
            return digest(file)

        shards.digest = full  # type: ignore[assignment]
        try:
            write_folder(content, path)
        except CheckpointError as error:
            errors.append(str(error))
    shards.digest = digest
    dist.barrier()
    assert [file.name for file in folder.glob("*.ckpt")] == [path.name]
    assert not list(folder.glob(".*"))
    verify(path)
    write_folder(content, path)  # over the older one
    verify(path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.arange(6.0))
    return errors


class Hungry(Fixed):
    """Rank 1 has memory for one row."""

    def micro_batch_loss(self, micro: Any, metrics: Any) -> Tensor:
        if dist.get_rank() == 1 and len(micro) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return super().micro_batch_loss(micro, metrics)


def out_of_memory(rank: int, experience: dict[str, Any]) -> None:
    """With the guard that would repeat the minibatch under DDP."""
    module: Any = tiny_module(cls=Hungry, update=UPDATE)
    module.experience = experience
    trainer(FSDP2Strategy(timeout_seconds=60), [OOMGuard()], devices=2).fit(module, datamodule=prompts(module))


def numbers(rank: int, experience: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gradients of every setting, the norm over shards, and saves that fail."""
    found: dict[str, Any] = {}
    for name, settings in GRADIENTS.items():
        strategy = FSDP2Strategy(timeout_seconds=60, **settings.get("strategy", {}))
        found[name] = gradients_of(name, experience[name], strategy, 2)
    found["small clip"] = small_clip(init_device_mesh("cpu", (2,)))
    found["failed saves"] = failed_saves(Path.cwd() / "saves")
    return found


class Look(Callback):
    """Writes the state at the start of a run: all weights and the optimiser's state, gathered."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer: Any = pl_module.optimizers()
        states = {"state_dict": dict(pl_module.state_dict()), "optimizer_states": [optimizer.optimizer.state_dict()]}
        states = _whole(states)
        if trainer.is_global_zero:
            torch.save(states, self.path)


def _whole(value: Any) -> Any:
    if isinstance(value, Tensor):
        return whole(value).clone()
    if isinstance(value, dict):
        return with_items(value, ((key, _whole(item)) for key, item in value.items()))
    return [_whole(item) for item in value] if isinstance(value, list) else value


def run(overrides: list[str]) -> dict[str, float]:
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = hydra.compose("train", overrides=overrides)
    return train(config)


def run_all(rank: int, runs: list[list[str]]) -> list[dict[str, float]]:
    """Trainings one after the other."""
    return [run(overrides) for overrides in runs]
