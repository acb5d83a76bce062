"""Checks of the Lightning Trainer's block: options that another key sets, devices, strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_rlhf.distributed.ray_settings import workers_of, wrong_options
from lightning_rlhf.settings import SettingError

REFUSED_TRAINER_OPTIONS = {
    "gradient_clip_val": "module.actor.clip_norm and module.critic.clip_norm act, one limit per parameter group",
    "gradient_clip_algorithm": "gradients are clipped by norm: module.actor.clip_norm, module.critic.clip_norm",
    "accumulate_grad_batches": "module.update.minibatch_size is the size of a step, module.update.micro_batch_tokens "
    "what goes through the model at once",
    "max_epochs": "iterations is the length of the run",
    "min_epochs": "iterations is the length of the run",
    "max_steps": "iterations is the length of the run",
    "min_steps": "iterations is the length of the run",
    "max_time": "iterations is the length of the run",
    "fast_dev_run": "iterations=1 is a short run",
    "limit_train_batches": "iterations is the length of the run",
    "overfit_batches": "iterations is the length of the run",
    "reload_dataloaders_every_n_epochs": "the data module starts its next pass over the prompts by itself",
    "check_val_every_n_epoch": "evaluate_every counts iterations",
    "val_check_interval": "evaluate_every counts iterations",
    "num_sanity_val_steps": "the held-out prompts are evaluated before training anyway",
    "log_every_n_steps": "each iteration is logged once",
    "use_distributed_sampler": "the data module divides the prompts itself",
    "enable_checkpointing": "callbacks.checkpoint=null switches checkpoints off",
    "default_root_dir": "output_dir is the run's folder",
    "callbacks": "the group callbacks holds them",
    "logger": "the group logger holds it",
}
"""Options of the Lightning Trainer that manual optimisation does not support, or that another key sets."""


STRATEGIES = ("auto", "ddp")
"""Strategies that can be given by name; others need a block with a _target_."""


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "32", "bf16", "16")
"""Values of ``trainer.precision``; the last three are Lightning's short forms of 32-true and the mixed ones."""


def wrong_trainer_options(trainer: Mapping[str, Any]) -> Iterator[SettingError]:
    """Options that would be ignored or refused later, each with what is allowed or the key to use instead.

    Args:
        trainer: the block, as plain containers.
    """
    for name, acting in REFUSED_TRAINER_OPTIONS.items():
        if name in trainer:
            yield SettingError(f"trainer.{name}", trainer[name], f"not used here: {acting}")
    precision = trainer.get("precision")
    if str(precision).partition("-")[0] == "64":
        yield SettingError("trainer.precision", precision, "at most 32-true: log-probabilities and losses are float32")
    elif precision is not None and str(precision) not in PRECISIONS:
        yield SettingError("trainer.precision", precision, ", ".join(PRECISIONS))
    yield from _processes(trainer)
    yield from wrong_options(trainer)
    if trainer.get("accelerator") == "npu":
        from lightning_rlhf.accelerators.npu import check_options

        try:
            check_options(trainer)
        except SettingError as error:
            yield error


def _processes(trainer: Mapping[str, Any]) -> Iterator[SettingError]:
    """Invalid devices, number of machines and strategies."""
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    whole = isinstance(devices, int) and not isinstance(devices, bool) and (devices >= 1 or devices == -1)
    indices = isinstance(devices, list) and devices and all(isinstance(i, int) and i >= 0 for i in devices)
    if not (whole or indices or devices == "auto"):
        yield SettingError("trainer.devices", devices, "a whole number >= 1, a list of device indices, or auto (all)")
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        yield SettingError("trainer.num_nodes", nodes, "a whole number >= 1")
    strategy = trainer.get("strategy", "auto")
    if isinstance(strategy, str) and strategy not in STRATEGIES and trainer.get("accelerator") != "npu":
        near = {"fsdp": "trainer=fsdp2", "fsdp2": "trainer=fsdp2", "ddp_spawn": "ddp"}.get(strategy)
        guess = f"did you mean {near}? " if near else ""
        yield SettingError("trainer.strategy", strategy, f"{guess}{', '.join(STRATEGIES)}, or a block with a _target_")


def processes_of(trainer: Mapping[str, Any]) -> int | None:
    """Number of training processes of the run; ``None`` if it depends on the machine (``auto``)."""
    if trainer.get("ray") is not None:
        return workers_of(trainer)
    devices = trainer.get("devices", 1)
    count = len(devices) if isinstance(devices, list) else devices
    nodes = trainer.get("num_nodes", 1)
    return count * nodes if isinstance(count, int) and isinstance(nodes, int) and count > 0 else None
