"""Compose -> check -> claim the folder -> start: in this process, in several on this machine, or on Ray."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf import schema
from lightning_rlhf.assembly import building, newest_checkpoint
from lightning_rlhf.distributed import launch
from lightning_rlhf.distributed.orphans import ends_with_parent
from lightning_rlhf.distributed.processes import is_first
from lightning_rlhf.reporting.terminal import run_log, say
from lightning_rlhf.run import run
from lightning_rlhf.runs import folder as run_folder
from lightning_rlhf.runs.ending import failing
from lightning_rlhf.runs.recompose import Composition
from lightning_rlhf.runs.refusal import refuse_a_used_folder, refuse_an_empty_branch
from lightning_rlhf.runs.resume import Resumption, planned, planned_from, value_in
from lightning_rlhf.supervise.ending import recorded


@recorded()
@failing()
def train(
    config: DictConfig, *, resumption: Resumption | None = None, composition: Composition | None = None
) -> dict[str, float]:
    """Run one training from a composed configuration.

    Args:
        config: as composed by Hydra from ``conf/train.yaml``. With ``resume`` the run keeps its own settings, changed
            by those that differ here from the shipped defaults.
        resumption: how to resume, if already planned; then only the folder is taken from ``config``.
        composition: the overrides that ``config`` was composed from, recorded for a later resume.

    Returns:
        The last value of every metric; those of the held-out prompts (``eval/...``) are from after training.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        InputError: a part cannot be built as configured (a malformed data row, a missing package, ...); the folder
            belongs to another run, or a run is active in it.
    """
    resumption = resumption or _planned(config, composition)
    if resumption is None:
        plain = schema.check(config) | {"resume": None}
    else:
        folder = value_in(config, "output_dir") or resumption.run or resumption.checkpoint.parent
        plain = schema.check(OmegaConf.create(resumption.settings_in(folder)))
    with ExitStack() as locks:
        if TorchElasticEnvironment.detect():  # torchrun may be killed, and its processes are not
            locks.enter_context(ends_with_parent())
        if is_first():
            _begin(plain, resumption, composition or Composition(), locks)
            with run_log(plain["output_dir"], first=True):
                if resumption is not None:
                    say("\n".join(resumption.lines(plain["output_dir"])))
                elif config.get("resume") == "latest":
                    say(f"no checkpoint in {plain['output_dir']}: starting afresh")
        if plain["trainer"].get("ray") is not None:
            with building("trainer.ray"):
                from lightning_rlhf.distributed import ray_launch
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
    resumption = planned(str(config.resume), composition) if composition is not None else planned_from(config)
    refuse_an_empty_branch(resumption)
    return resumption


def _begin(plain: dict[str, Any], resumption: Resumption | None, composition: Composition, locks: ExitStack) -> None:
    """Lock the output folder for this run, and that of its checkpoints, and record the start there."""
    folder = Path(plain["output_dir"]).absolute()
    locks.enter_context(run_folder.locked(folder))
    checkpoints = run_folder.checkpoint_folder(plain)
    if resumption is not None:
        refuse_a_used_folder(resumption, folder, checkpoints)
    elsewhere = {} if checkpoints.is_relative_to(folder) else {"checkpoints": str(checkpoints)}
    others: dict[Path, str] = {}
    if resumption is not None and resumption.run is not None and not resumption.branch:
        others[resumption.run.absolute()] = "hydra.run.dir"
    if elsewhere and ":/" not in str(checkpoints):  # an address (s3://...) is left to Lightning's writer
        others.setdefault(run_folder.owner_of(checkpoints), "callbacks.checkpoint.dirpath")
    others.pop(folder, None)
    for other, key in others.items():
        locks.enter_context(run_folder.locked(other, key))
    if resumption is None:
        run_folder.refuse_a_second_run(folder, schema.get(plain, "callbacks.checkpoint.dirpath"))
        run_folder.note_start(folder, {"typed": list(composition.overrides), **composition.plain(), **elsewhere})
        return
    run_folder.note_start(folder, resumption.record() | elsewhere, plain)
