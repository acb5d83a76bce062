"""Resume a run: with its own settings, changed by new overrides, in its own folder or in that of a branch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.assembly import find_checkpoint, newest_checkpoint
from lightning_rlhf.checkpoint.files import STATE, iteration_of, latest_valid
from lightning_rlhf.files import as_file, spelt_out
from lightning_rlhf.reporting import blocks_of, tracked
from lightning_rlhf.reporting.loggers import MLFLOW
from lightning_rlhf.runs.folder import kept_elsewhere, quoted, starts
from lightning_rlhf.runs.moved import folder_of_command, moved
from lightning_rlhf.runs.recompose import (
    OF_ONE_START,
    Composition,
    apply_difference,
    compose,
    recomposed,
    resolved,
    value_of,
)
from lightning_rlhf.schema import InputError, flatten, get
from lightning_rlhf.schema.shipped import train_file

SAME_NUMBERS = (
    *OF_ONE_START,
    "iterations",
    "evaluate_every",
    "run_name",
    "threads",
    "logger",
    "logger.*",
    "progress_every",
    "callbacks.calibrate",
    "callbacks.calibrate.*",
    "callbacks.checkpoint",
    "callbacks.checkpoint.*",
    "callbacks.samples_table",
    "callbacks.samples_table.*",
    "callbacks.prompt_monitor*",
    "callbacks.prompt_records*",
    "callbacks.alp_figures",
    "callbacks.alp_figures.*",
    "data.validation_batch_size",
    "data.validation_limit",
    "module.update.micro_batch_tokens",
    "module.update.micro_batch_size",
    "module.update.score_tokens",
    "rollout.urls",
    "rollout.requests_per_server",
    "rollout.request_timeout",
    "rollout.retries",
    "rollout.retry_seconds",
    "rollout.weights_*",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.enable_*",
    "trainer.num_nodes",
    "trainer.profiler*",
    "trainer.ray",
    "trainer.ray.*",
    "trainer.strategy",
    "trainer.strategy.*",
)
"""Keys that can change while a run stays the same run: logging, checkpoints, length, devices, micro-batch sizes.

``iterations`` is among them although the learning-rate schedule ends there: recorded values stay valid, and from the
next iteration on the learning rates are those of a run of the new length.
"""


@dataclass(frozen=True)
class Resumption:
    """How one start resumes a run.

    Attributes:
        checkpoint: the checkpoint from which training continues.
        iteration: the iteration after which it was written.
        run: the folder of the run it belongs to; ``None`` for a file outside of any run's folder.
        config: the configuration of this start, with the paths of ``run``.
        changes: changes against the run's configuration: key -> old value, new value (``MISSING`` if there is none).
        composition: the overrides that this configuration is composed from.
        branch: why this is a branch of the run, and not the run itself; empty if it is the run.
        outputs: folder of the run when the checkpoint was written.
        typed: the overrides of this start.
        other_data: whether the training data may differ from the checkpoint's.
    """

    checkpoint: Path
    iteration: int
    run: Path | None
    config: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]
    composition: Composition
    branch: list[str]
    outputs: str
    typed: tuple[str, ...] = field(default=())
    other_data: bool = False

    def settings_in(self, folder: str | Path) -> dict[str, Any]:
        """The configuration of this start with ``folder`` as its output folder."""
        folder = Path(folder).absolute()
        config = moved(self.config, self.run, self.outputs, folder, typed=self.changes)
        config |= {"output_dir": str(folder), "resume": str(self.checkpoint.absolute()), "branch": None}
        config["resume_on_other_data"] = self.other_data
        earlier = None if self.run is None else str(self.run)
        config["logger"] = tracked(config.get("logger"), resume_from=None, branch_from=None)
        if self.branch:
            config["logger"] = tracked(config["logger"], branch_from=earlier, branch_iteration=self.iteration)
        elif earlier is not None and latest_record(self.run, folder):
            config["logger"] = tracked(config["logger"], resume_from=earlier)
        return config

    def lines(self, folder: str | Path) -> Iterator[str]:
        """A few lines for the user about this resume."""
        yield f"resuming from {self.checkpoint} (iteration {self.iteration})"
        if self.changes:
            yield "changed settings (all others as before):"
            yield from (f"  {key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in in_short(self.changes))
        schedule = get(self.config, "module.optimizer.schedule")
        if "iterations" in self.changes and schedule not in (None, "constant"):
            end = self.config["iterations"]
            yield f"the {schedule} learning-rate schedule now ends at iteration {end};"
            yield "  learning rates follow it from here on"
        if self.branch:
            why = "; ".join(self.branch)
            yield f"a branch, for {why}: its files go to"
            yield f"  {folder}"
            if any(block.get("_target_") == MLFLOW for block in blocks_of(self.config.get("logger")).values()):
                yield "and its MLflow run is a child of the original run's"
            yield "(branch=false continues the run itself and renames its later checkpoints)"

    def record(self) -> dict[str, Any]:
        """The entry for the list of starts."""
        changes = {key: [_shown(old), _shown(new)] for key, (old, new) in self.changes.items()}
        branch = {"branch_of": str(self.run), "because": self.branch} if self.branch else {}
        start = {"checkpoint": str(self.checkpoint.absolute()), "iteration": self.iteration, "changes": changes}
        return {"typed": list(self.typed), **self.composition.plain(), **start, **branch}


class _Missing:
    def __repr__(self) -> str:
        return "(none)"


MISSING = _Missing()


# --- planning --------------------------------------------------------------------------------------------------------


def planned(where: str, new: Composition, key: str = "resume") -> Resumption:
    """How to resume the run or the checkpoint at ``where``, the value of ``key``, under new overrides.

    Raises:
        InputError: there is no complete checkpoint, or an override is invalid.
    """
    checkpoint = find_checkpoint(where, key)
    saved, iteration = read_settings(checkpoint)
    run = run_of(checkpoint, where, saved)
    config, composition = recomposed(saved, composition_of(run, iteration), new)
    wishes = {key: value_of(new.overrides, key) for key in ("branch", "resume_on_other_data")}
    return _resumption(where, checkpoint, iteration, run, saved, config, composition, wishes, new.overrides)


def planned_from(config: DictConfig) -> Resumption:
    """The same for a configuration that was composed elsewhere, with ``resume`` in it.

    Values that differ from the shipped defaults count as overrides.

    Raises:
        InputError: there is no complete checkpoint.
    """
    folder = value_in(config, "output_dir")
    checkpoint = find_checkpoint(str(config.resume), "resume")
    saved, iteration = read_settings(checkpoint)
    run = run_of(checkpoint, str(config.resume), saved)
    where = folder or str(run or checkpoint.parent)
    before = resolved(compose(Composition(), where))
    given: Any = OmegaConf.to_container(OmegaConf.merge(config, {"output_dir": where}), resolve=True)
    for part in (before, given):
        for key in OF_ONE_START:
            part.pop(key, None)
    before, given = (moved(part, None, where, Path(saved["output_dir"])) for part in (before, given))
    settings = apply_difference(saved, before, given)
    own = composition_of(run, iteration)
    wishes = {key: config.get(key) for key in ("branch", "resume_on_other_data")}
    return _resumption(str(config.resume), checkpoint, iteration, run, saved, settings, own, wishes, ())


def _resumption(
    where: str,
    checkpoint: Path,
    iteration: int,
    run: Path | None,
    saved: Mapping[str, Any],
    config: dict[str, Any],
    composition: Composition,
    wishes: Mapping[str, Any],
    typed: tuple[str, ...],
) -> Resumption:
    for key, value in wishes.items():
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{key} = {value!r} is not allowed: true, false{' or null' if key == 'branch' else ''}")
    wish, other_data = wishes["branch"], bool(wishes["resume_on_other_data"])
    wanted = config.get("iterations")
    if isinstance(wanted, int) and wanted < iteration:
        raise InputError(f"iterations = {wanted} is not allowed: the checkpoint has already done {iteration}")
    changes = dict(differences(saved, config))
    other = [key for key, _ in in_short({k: v for k, v in changes.items() if not keeps_numbers(k)})]
    named = other if len(other) <= 3 else [*other[:2], f"{len(other) - 2} more"]
    reasons = [f"other numbers follow from {', '.join(named)}"] if other else []
    is_newest = checkpoint != spelt_out(where)  # a folder means its newest checkpoint
    newest = iteration if is_newest else newest_iteration(checkpoint)
    if newest > iteration:
        reasons.append(f"the run has gone on to iteration {newest} since")
    if run is None:
        reasons.append("the checkpoint lies outside of a run's folder")
    if other_data:
        reasons.append("its data may be other than the run's (resume_on_other_data=true)")
    if wish is not None:
        reasons = (reasons or ["it was asked for (branch=true)"]) if wish else []
    outputs = str(saved.get("output_dir"))
    return Resumption(checkpoint, iteration, run, config, changes, composition, reasons, outputs, typed, other_data)


def differences(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Leaf keys whose values differ from the saved configuration: old and new value."""
    old, new = dict(flatten(saved)), dict(flatten(config))
    for key in dict.fromkeys([*old, *new]):
        then, now = old.get(key, MISSING), new.get(key, MISSING)
        if key not in OF_ONE_START and (type(then) is not type(now) or then != now):
            yield key, (then, now)


def in_short(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The same in short: a block that was added or removed is listed once, with its class."""
    ends = [key for key, pair in changes.items() if key.endswith("._target_") and MISSING in pair]
    whole = {key.removesuffix("._target_") for key in ends}
    for key, pair in changes.items():
        if key in ends:
            yield key.removesuffix("._target_"), pair
        elif not any(key.startswith(f"{name}.") or key == name for name in whole):
            yield key, pair


def keeps_numbers(key: str) -> bool:
    """Whether a run stays the same run with another value of this key (:data:`SAME_NUMBERS`)."""
    return any(fnmatch(key, pattern) for pattern in SAME_NUMBERS)


# --- reading a folder and a checkpoint ------------------------------------------------------------------------------


def read_content(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's content, with tensors left on disk; of a folder of shards the part that is not sharded.

    Raises:
        InputError: it cannot be read.
    """
    file = checkpoint / STATE if checkpoint.is_dir() else checkpoint
    try:
        return dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    except (OSError, RuntimeError, EOFError, ValueError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise InputError(f"checkpoint = {str(checkpoint)!r} cannot be read: {text}") from error


def read_settings(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """Configuration and iteration of a checkpoint, without reading its weights.

    Raises:
        InputError: it was not written by a run of this package, or cannot be read.
    """
    content = read_content(checkpoint)
    try:
        config = content["lightning_rlhf"]["run_config"]
    except (KeyError, TypeError):
        config = None
    if not config:
        raise InputError(
            f"checkpoint = {str(checkpoint)!r} holds no configuration: `lightning-rlhf train` did not write it"
        )
    return with_todays_keys(config), int(content.get("iteration", max(iteration_of(checkpoint), 0)))


def with_todays_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, possibly of an earlier release, with top-level keys that it lacks at their defaults."""
    top = {key: value for key, value in train_file().items() if key not in ("defaults", "hydra")}
    return {key: value for key, value in top.items() if key not in config and "${" not in str(value)} | dict(config)


def run_of(checkpoint: Path, where: str, saved: Mapping[str, Any]) -> Path | None:
    """The folder of the run that a checkpoint belongs to: a folder above it, or one whose record names its folder.

    Args:
        checkpoint: the checkpoint.
        where: the value of ``resume``, which may be the run's folder.
        saved: the configuration of the checkpoint.
    """
    for folder in (spelt_out(where).absolute(), Path(str(saved.get("output_dir"))).absolute()):
        if kept_elsewhere(folder) == checkpoint.absolute().parent:
            return folder
    for folder in (checkpoint.absolute().parent.parent, checkpoint.absolute().parent):
        if any((folder / name).exists() for name in ("starts.jsonl", ".hydra", "launch.json", "tracking/run.json")):
            return folder
    return None


def newest_iteration(checkpoint: Path) -> int:
    """The highest iteration among the complete checkpoints beside this one."""
    found = latest_valid(checkpoint.parent)
    return -1 if found is None else iteration_of(found)


def composition_of(run: Path | None, iteration: int) -> Composition:
    """The overrides of the start that wrote a run's checkpoint of this iteration; empty if unknown.

    That is the newest start that continued from an earlier iteration: a start that died before its first checkpoint
    wrote none.
    """
    if run is None:
        return Composition()
    recorded = [record for record in starts(run) if "overrides" in record]
    wrote = [record for record in recorded if record.get("iteration", 0) < iteration] or recorded[:1]
    if wrote:
        return Composition.read(wrote[-1])
    typed = as_file(run / ".hydra" / "overrides.yaml")
    return Composition(tuple(OmegaConf.to_container(OmegaConf.load(typed)))) if typed.exists() else Composition()  # type: ignore[arg-type]


def latest_record(run: Path | None, folder: Path) -> bool:
    """Whether a run has the record of a logger that can continue it."""
    return run is not None and any((where / "tracking" / "run.json").exists() for where in (run, folder))


def value_in(config: DictConfig, key: str) -> Any:
    """A value of a composed configuration; ``None`` if it needs Hydra, which is not running."""
    try:
        return config.get(key)
    except (OmegaConfBaseException, ValueError):
        return None  # ${hydra:...} outside of Hydra


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, _Missing) else "null" if value is None else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


# --- from the command line -------------------------------------------------------------------------------------------


def from_command(words: Sequence[str], shared: str | None = None) -> tuple[list[str], Resumption | None]:
    """The arguments that ``lightning-rlhf train`` passes to Hydra to resume a run.

    Hydra then only opens the folder and the log file: the configuration is that of the resumption.

    Args:
        words: the arguments of the command.
        shared: the folder that processes started elsewhere have in common.

    Returns:
        The arguments for Hydra, and the resumption; if no run is resumed, ``words`` unchanged and ``None``.

    Raises:
        InputError, HydraException: as :func:`planned`.
    """
    looking = ("-m", "--multirun", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--hydra-help")
    if any(word.partition("=")[0] in looking for word in words) or "hydra.mode=MULTIRUN" in words:
        return list(words), None
    new = Composition.of_command(words)
    where, folder = value_of(new.overrides, "resume"), value_of(words, "hydra.run.dir")
    if where == "latest":
        found = newest_checkpoint(folder or shared) if folder or shared else None  # type: ignore[arg-type]
        where = None if found is None else str(found)
    if where is None:
        return list(words), None
    resumption = planned(str(where), new)
    kept = [word for word in words if word not in new.overrides]
    if resumption.composition.config_dir and not new.config_dir:
        kept = ["--config-dir", resumption.composition.config_dir, *kept]
    if folder is None and not resumption.branch and resumption.run is not None:
        kept.append(f"hydra.run.dir={quoted(resumption.run)}")
    kept.append("hydra.output_subdir=null")  # keep the files that Hydra wrote at the first start
    command = folder_of_command(resumption.run, resumption.outputs)
    if command is not None:
        # Classes come from the folder where the run was started, whatever lies in the current one under their names.
        sys.path[:] = [str(command), *(entry for entry in sys.path if entry != str(command))]
    return kept, resumption
