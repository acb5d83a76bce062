"""What can refuse a checkpoint, checked before any record of its run is touched.

Lightning loads a checkpoint after loggers are opened and rewound. A resume that it refused there would have cut the
metrics of the run that it could not continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer
from torch import Tensor

from lightning_rlhf.assembly import Parts, building
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.checkpoint.shards import shapes_of_shards
from lightning_rlhf.errors import InputError
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.runs.folder import refuse_a_second_run
from lightning_rlhf.runs.resume import Resumption, read_content

_SHOWN = 3
"""Weights that a message names at most."""


def refuse_an_empty_branch(resumption: Resumption) -> None:
    """Refuse a branch that would train nothing; a run that goes on in its own folder may have nothing left to do.

    Raises:
        InputError: the checkpoint has done all iterations of the configuration, and this start would be a branch.
    """
    wanted, done = resumption.config.get("iterations"), resumption.iteration
    if resumption.branch and isinstance(wanted, int) and wanted <= done:
        raise InputError(
            f"iterations = {wanted} is not allowed: {resumption.checkpoint} has done {done} already, so a branch of it "
            f"would train nothing ({'; '.join(resumption.branch)}); allowed: more than {done}"
        )


def refuse_a_used_folder(resumption: Resumption, folder: Path, checkpoints: Path) -> None:
    """Refuse a branch in the folder of its run, and any resume in a folder with the checkpoints of another run.

    Checkpoints there would be set aside or count among those that ``callbacks.checkpoint.keep`` removes.

    Args:
        resumption: of this start.
        folder: its output folder.
        checkpoints: the folder of its checkpoints.

    Raises:
        InputError: names the folder, and what is allowed.
    """
    own = resumption.run is not None and folder.resolve() == resumption.run.resolve()
    if own and resumption.branch:
        raise InputError(
            f"hydra.run.dir = {str(folder)!r} is the folder of the run itself, and this start would be a branch of it "
            f"({'; '.join(resumption.branch)}), which must not write over the run's checkpoints and record; allowed: a "
            "folder of its own, hydra.run.dir=FOLDER, or branch=false to continue the run itself with these settings"
        )
    if not own:
        refuse_a_second_run(folder)
    kept = resumption.checkpoint.resolve().parent
    if resumption.branch and checkpoints.resolve() == kept:
        raise InputError(
            f"callbacks.checkpoint.dirpath = {str(checkpoints)!r} is where the run keeps its checkpoints, and a branch "
            "would set them aside: give it a folder of its own, callbacks.checkpoint.dirpath=FOLDER"
        )
    if checkpoints.resolve() != kept:
        refuse_a_second_run(checkpoints)


def refuse_other_data(parts: Parts, checkpoint: Path) -> None:
    """Ask the data module whether its data is that of the checkpoint.

    Raises:
        InputError: it is not, and ``resume_on_other_data`` is not set.
    """
    check = getattr(parts.datamodule, "refuse_other_data", None)
    if check is not None:
        with building("data"):
            check(read_content(checkpoint).get(type(parts.datamodule).__qualname__, {}))


def refuse_other_model(module: ActorCriticModule, trainer: Trainer, checkpoint: Path) -> None:
    """Compare weights, optimiser groups and reference model with the checkpoint's; it must say its iteration.

    Weights and groups are compared only where nothing but the kit decides what they are when the checkpoint is loaded:
    a user's ``on_load_checkpoint`` may adapt it, a user's ``configure_model`` may add layers first.

    Args:
        module: as assembled, not yet sharded nor moved.
        trainer: that will fit it.
        checkpoint: a file or a folder of shards.

    Raises:
        InputError: they differ; names the checkpoint and what differs.
        CheckpointError: the checkpoint does not say its iteration.
    """
    content = read_content(checkpoint)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, IterationCheckpoint):
            callback.refuse_uncounted(content)
    if module.strict_loading and not _by_users(module, "on_load_checkpoint", "configure_model"):
        saved = {name: _shape(value) for name, value in content["state_dict"].items()}
        shards = shapes_of_shards(checkpoint, "state_dict") if checkpoint.is_dir() else {}
        own = {name: _shape(v) for name, v in module.state_dict().items() if not name.startswith("reference.")}
        groups = [] if _by_users(module, "parameter_groups") else list(_other_groups(module, content))
        if found := [*_other_weights(saved | shards, own), *groups]:
            raise InputError(
                f"checkpoint = {str(checkpoint)!r} does not fit the model of this run: {'; '.join(found)}. Settings of "
                "model or module differ from those it was trained with, or the model's files do: restore them, or "
                "start a new run"
            )
    if hasattr(type(trainer.strategy), "sharding"):
        trainer.precision_plugin.convert_module(module)  # as before sharding, when the saved fingerprint was computed
    module.refuse_other_reference(content)


def _by_users(module: ActorCriticModule, *hooks: str) -> bool:
    """Whether a class outside of the kit and of Lightning overrides one of these methods."""
    ours = ("lightning_rlhf", "lightning")
    theirs = [cls for cls in type(module).__mro__ if cls.__module__.split(".")[0] not in ours]
    return any(hook in vars(cls) for cls in theirs for hook in hooks)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _other_weights(
    saved: Mapping[str, tuple[int, ...] | None], own: Mapping[str, tuple[int, ...] | None]
) -> Iterator[str]:
    """What differs between the weights of a checkpoint and of a module, in words."""
    if missing := [name for name in own if name not in saved]:
        yield f"it lacks {_listed(missing)}"
    if unknown := [name for name in saved if name not in own]:
        yield f"it holds {_listed(unknown)}, which this model has not"
    both = [(name, saved[name], own[name]) for name in own if name in saved]
    other = [f"{name} ({_size(then)} there, {_size(now)} here)" for name, then, now in both if _differ(then, now)]
    if other:
        yield f"other shapes: {_listed(other)}"


def _differ(then: tuple[int, ...] | None, now: tuple[int, ...] | None) -> bool:
    return then is not None and now is not None and then != now


def _size(shape: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "a number"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _other_groups(module: ActorCriticModule, content: Mapping[str, Any]) -> Iterator[str]:
    """Whether the optimiser has other groups, or groups of other sizes, than the saved one; PyTorch refuses those."""
    states = content.get("optimizer_states") or []
    if len(states) != 1:
        return
    saved, own = states[0]["param_groups"], module.parameter_groups()
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        yield f"its optimiser trains {_groups(saved)}, this run's {_groups(own)}"


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{group.get('name', 'a group')} ({len(group['params'])} tensors)" for group in groups)
