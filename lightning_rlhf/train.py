"""Compose -> check -> seed -> instantiate -> fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from lightning import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf import launch, precision, run_folder, schema, warmup
from lightning_rlhf.assembly import Parts, assemble, building, find_checkpoint, make_trainer, newest_checkpoint
from lightning_rlhf.data.sources import DataError
from lightning_rlhf.ending import told
from lightning_rlhf.interruption import Signals
from lightning_rlhf.recompose import Composition
from lightning_rlhf.reporting import log_config, tell
from lightning_rlhf.reporting.terminal import run_log, say
from lightning_rlhf.resume import Resumption, planned, planned_from, read_content, read_settings, value_in


def train(
    config: DictConfig, *, resumption: Resumption | None = None, composition: Composition | None = None
) -> dict[str, float]:
    """Run one training from a composed configuration.

    Args:
        config: as composed by Hydra from ``conf/train.yaml``. With ``resume`` in it the run goes on under its own
            settings, changed by what differs here from the shipped defaults.
        resumption: how to go on, where that is planned already; then only the folder is taken from ``config``.
        composition: the overrides that ``config`` was composed from, for whoever goes on with this run.

    Returns:
        The last value of every metric; those of the held-out prompts (``eval/...``) are from after training.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        InputError: a part cannot be built as configured (a malformed data row, a missing package, ...); the folder
            belongs to another run, or one is at work in it.
    """
    resumption = resumption or _planned(config, composition)
    if resumption is None:
        plain = schema.check(config) | {"resume": None}
    else:
        folder = value_in(config, "output_dir") or resumption.run or resumption.checkpoint.parent
        plain = schema.check(OmegaConf.create(resumption.settings_in(folder)))
    with ExitStack() as locks:
        if launch.is_first():
            _begin(plain, resumption, composition or Composition(), locks)
            with run_log(plain["output_dir"], first=True):
                if resumption is not None:
                    say("\n".join(resumption.lines(plain["output_dir"])))
                elif config.get("resume") == "latest":
                    say(f"no checkpoint in {plain['output_dir']}: starting afresh")
        if plain["trainer"].get("ray") is not None:
            with building("trainer.ray"):
                from lightning_rlhf import ray_launch
            return ray_launch.start(plain)
        processes = launch.local_devices(plain)
        if processes > 1 and not launch.started_outside():
            return launch.start(plain, processes)
        return run(plain)


def _planned(config: DictConfig, composition: Composition | None) -> Resumption | None:
    if config.get("resume") == "latest":
        folder = value_in(config, "output_dir")
        if folder is not None and Path(folder).absolute() in run_folder.claimed:
            shutil.rmtree(folder)
            raise schema.InputError(
                "resume = 'latest' is not allowed in a folder that is new at every start: give the run a folder, "
                "hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER for a sweep), or name the run, resume=FOLDER"
            )
        found = None if folder is None else newest_checkpoint(folder)
        if found is None:
            return None
        config = OmegaConf.merge(config, {"resume": str(found)})  # type: ignore[assignment]
    if config.get("resume") is None:
        return None
    return planned(str(config.resume), composition) if composition is not None else planned_from(config)


def _begin(plain: dict[str, Any], resumption: Resumption | None, composition: Composition, locks: ExitStack) -> None:
    """The folder is this run's alone, and the start is noted there."""
    folder = Path(plain["output_dir"])
    locks.enter_context(run_folder.locked(folder))
    checkpoints = run_folder.checkpoint_folder(plain)
    elsewhere = {} if checkpoints.is_relative_to(folder.absolute()) else {"checkpoints": str(checkpoints)}
    if resumption is None:
        run_folder.refuse_a_second_run(folder, schema.get(plain, "callbacks.checkpoint.dirpath"))
        run_folder.note_start(folder, {"typed": list(composition.overrides), **composition.plain(), **elsewhere})
        return
    if resumption.branch and elsewhere and checkpoints == resumption.checkpoint.absolute().parent:
        raise schema.InputError(
            f"callbacks.checkpoint.dirpath = {str(checkpoints)!r} is where the run keeps its checkpoints, and a branch "
            "would set them aside: give it a folder of its own, callbacks.checkpoint.dirpath=FOLDER"
        )
    if resumption.run is not None and not resumption.branch and resumption.run != folder.absolute():
        locks.enter_context(run_folder.locked(resumption.run))
    run_folder.note_start(folder, resumption.record() | elsewhere, plain)


def run(plain: dict[str, Any]) -> dict[str, float]:
    """The training in one process, alone or beside others that do the same.

    Args:
        plain: as :func:`lightning_rlhf.schema.check` returns it; ``resume`` is a checkpoint or null.

    Returns:
        As :func:`train`.

    Raises:
        InputError: a part cannot be built as configured.
        Interrupted: SIGINT, SIGTERM or SIGHUP; a checkpoint was written if anything was trained (:mod:`.interruption`).
        TrainingFailed: a callback has found the run to be broken.
    """
    with Signals(), run_log(plain["output_dir"], first=launch.is_first()), told(plain, speaks=launch.is_first()):
        return _run(plain)


def _run(plain: dict[str, Any]) -> dict[str, float]:
    plain, replaced = precision.fit(plain)
    if launch.is_first():
        introduce(plain, replaced)
    checkpoint = None if plain["resume"] is None else find_checkpoint(plain["resume"])
    parts = assemble(plain)
    parts.datamodule.accept_other_data = plain["resume_on_other_data"]
    if checkpoint is not None:
        refuse_other_data(parts, checkpoint)
    with closing(parts.module.engine):
        trainer = make_trainer(plain)
        if checkpoint is not None:
            tell(trainer.loggers, "log_start", read_settings(checkpoint)[1])
        log_config(trainer.loggers, plain)
        # A resumed run has its weights only once fit begins.
        before = held_out(trainer, parts) if checkpoint is None else {}
        try:
            trainer.fit(parts.module, datamodule=parts.datamodule, ckpt_path=checkpoint, weights_only=True)
        except DataError as error:
            raise schema.InputError(str(error)) from error
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        after = held_out(trainer, parts)
        if trainer.is_global_zero:
            say("\n".join(closing_lines(parts, trainer, before, after)))
        return metrics | after


def introduce(config: dict[str, Any], replaced: Sequence[precision.Replaced] = ()) -> None:
    """What a user should know before the work starts."""
    for text in [*replaced, *schema.warnings(config)]:
        say(f"note: {text}")
    if config.get("warmup") and config.get("resume") is None:
        say(warmup.announcement(config["warmup"]))
    elif config.get("warmup"):
        say("the supervised warm-up of the run's start gives the reference model again")
    batch = schema.arithmetic(config)
    if batch is not None:  # an engine or data module of one's own may name its sizes otherwise
        say(str(batch))


def refuse_other_data(parts: Parts, checkpoint: Path) -> None:
    """Before anything of the run is opened: a data module that knows its data says whether it is the checkpoint's.

    Raises:
        InputError: it is not, and ``resume_on_other_data`` is not set.
    """
    check = getattr(parts.datamodule, "refuse_other_data", None)
    if check is not None:
        with building("data"):
            check(read_content(checkpoint).get(type(parts.datamodule).__qualname__, {}))


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
    return lines + [line for told in tell(trainer.loggers, "closing_lines") for line in told]
