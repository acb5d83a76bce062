"""Compose -> check -> seed -> instantiate -> fit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from lightning import Trainer
from omegaconf import DictConfig

from lightning_rlhf import launch, schema
from lightning_rlhf.assembly import Parts, assemble, building, find_checkpoint, make_trainer
from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.data.sources import DataError
from lightning_rlhf.ending import told
from lightning_rlhf.interruption import Signals
from lightning_rlhf.reporting import RLMLFlowLogger


def train(config: DictConfig) -> dict[str, float]:
    """Run one training from a composed configuration.

    Args:
        config: as composed by Hydra from ``conf/train.yaml``.

    Returns:
        The last value of every metric; those of the held-out prompts (``eval/...``) are from after training.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        InputError: a part cannot be built as configured (a malformed data row, a missing package, ...).
    """
    plain = schema.check(config)
    if plain["trainer"].get("ray") is not None:
        with building("trainer.ray"):
            from lightning_rlhf import ray_launch
        return ray_launch.start(plain)
    processes = launch.local_devices(plain)
    if processes > 1 and not launch.started_outside():
        return launch.start(plain, processes)
    return run(plain)


def run(plain: dict[str, Any]) -> dict[str, float]:
    """The training in one process, alone or beside others that do the same.

    Args:
        plain: as :func:`lightning_rlhf.schema.check` returns it.

    Returns:
        As :func:`train`.

    Raises:
        InputError: a part cannot be built as configured.
        Interrupted: SIGINT or SIGTERM; a checkpoint was written if anything was trained (:mod:`.interruption`).
        TrainingFailed: a callback has found the run to be broken.
    """
    with Signals(), told(plain, speaks=launch.is_first()):
        return _run(plain)


def _run(plain: dict[str, Any]) -> dict[str, float]:
    if launch.is_first():
        introduce(plain)
    checkpoint = checkpoint_to_resume(plain)
    if checkpoint is not None and (plain.get("logger") or {}).get("resume_from", ".") is None:
        in_run = checkpoint.parent.name == "checkpoints"
        plain["logger"]["resume_from"] = str(checkpoint.parent.parent if in_run else checkpoint.parent)
    parts = assemble(plain)
    parts.datamodule.accept_other_data = plain["resume_on_other_data"]
    with closing(parts.module.engine):
        trainer = make_trainer(plain)
        for logger in trainer.loggers:
            if isinstance(logger, RLMLFlowLogger):
                logger.log_config(plain)
        # A resumed run has its weights only once fit begins.
        before = held_out(trainer, parts) if checkpoint is None else {}
        try:
            trainer.fit(parts.module, datamodule=parts.datamodule, ckpt_path=checkpoint, weights_only=True)
        except DataError as error:
            raise schema.InputError(str(error)) from error
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        after = held_out(trainer, parts)
        if trainer.is_global_zero:
            print("\n".join(closing_lines(parts, trainer, before, after)), flush=True)
        return metrics | after


def introduce(config: dict[str, Any]) -> None:
    """What a user should know before the work starts."""
    for text in schema.warnings(config):
        print(f"note: {text}")
    batch = schema.arithmetic(config)
    if batch is not None:  # an engine or data module of one's own may name its sizes otherwise
        print(batch, flush=True)


def checkpoint_to_resume(config: dict[str, Any]) -> Path | None:
    """The checkpoint that ``resume`` names; ``latest`` in a folder without one is a fresh start."""
    if config["resume"] is None:
        return None
    if config["resume"] == "latest":
        found = latest_valid(Path(config["output_dir"]) / "checkpoints")
    else:
        found = find_checkpoint(config["resume"])
    if launch.is_first():
        print(f"resuming from {found}" if found else f"no checkpoint in {config['output_dir']}: starting afresh")
    return found


def held_out(trainer: Trainer, parts: Parts) -> dict[str, float]:
    """The greedy scores of the held-out prompts under the current weights; empty without such prompts."""
    results = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    return {name: float(value) for result in results for name, value in result.items()}


def closing_lines(parts: Parts, trainer: Trainer, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What the run came to, and where it is."""
    lines = []
    for name in parts.module.reward.terms:
        if f"eval/{name}" in after:
            start = f"{before[f'eval/{name}']:.2f} -> " if before else ""
            lines.append(f"held-out {name.replace('_', ' ')}: {start}{after[f'eval/{name}']:.2f}")
    if parts.module.control.training_stopped:
        lines.append(f"stopped early: {parts.module.control.training_stopped}")
    lines.append(f"output folder: {trainer.default_root_dir}")
    for logger in trainer.loggers:
        if isinstance(logger, RLMLFlowLogger):
            lines.append(f"MLflow run {logger.run_id} in {logger.tracking_uri}")
            lines.append(f"to look at it: {logger.ui_command}")
    return lines
