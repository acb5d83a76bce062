"""Checks for keys that nothing reads, blocks without a target, and arguments that a class or function does not take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from lightning_rlhf.errors import Problem
from lightning_rlhf.kinds import blank, wrong_kind
from lightning_rlhf.schema.locate import locate, parameters_of
from lightning_rlhf.schema.shipped import flatten, groups, known_at_the_top, shipped_keys, train_file
from lightning_rlhf.schema.signatures import declared
from lightning_rlhf.schema.spelling import hint


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key, or ``default`` if a block on its path is missing or null."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


MIXIN_SETTINGS = {
    "alp": "lightning_rlhf.mixins.alp_settings.ALPSettings",
    "ptx": "lightning_rlhf.mixins.ptx_settings.PTXSettings",
    "rollout_correction": "lightning_rlhf.mixins.correction_settings.RolloutCorrectionSettings",
    "safety": "lightning_rlhf.rewards.safety.SafetySettings",
}
"""Blocks of ``module`` that belong to a mixin, or to the safety filter, and their settings classes; null or absent
switches it off."""


NEEDED_GROUPS = ("module", "model", "data", "reward", "rollout", "callbacks", "trainer", "logger")
"""Groups of which a run needs a file, be it an empty one."""


def top_level(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Top-level keys that are not in train.yaml or its groups, and keys of train.yaml that were taken out."""
    known = known_at_the_top()
    for name in train_file():
        if name not in ("defaults", "hydra", *config):
            yield Problem(name, None, "a value: the run needs this key, which was taken out")
    for name in NEEDED_GROUPS:
        if name not in config:
            off = f"; {name}=none is a run without" if "none" in groups()[name] else ""
            yield Problem(name, None, f"one of {', '.join(groups()[name])}: the group was taken out{off}")
    for name, value in config.items():
        if name in known:
            continue
        for key, leaf in flatten({name: value}):
            text = hint(key, [*known, *shipped_keys()]) or f"known at the top: {', '.join(known)}"
            yield Problem(key, leaf, f"nothing reads this key; {text}")


def blocks(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Blocks without a ``_target_``, and values that should be blocks."""
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


def targets(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown targets, unknown arguments of a target, and missing ones."""
    for key, node in _targeted(config):
        yield from _arguments(key, node)


def declared_arguments(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Arguments that a class of the kit does not take according to its source; nothing is imported."""
    for key, node in _targeted(config):
        found = declared(node["_target_"])
        if found is not None:
            yield from _unknown(key, node, list(found.names))
    for name, path in MIXIN_SETTINGS.items():
        given, found = get(config, f"module.{name}"), declared(path)
        if found is not None and isinstance(given, Mapping):
            yield from _unknown(f"module.{name}", given, list(found.names), "the block")


def kinds(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Values of another type than the class of the kit needs, and blank texts where a path or a name is needed."""
    for key, node in _targeted(config):
        found = declared(node["_target_"])
        for name in _given(key, node) if found is not None else ():
            if f"{key}.{name}" in CHECKED_ELSEWHERE:
                continue
            annotation = found.annotations.get(name, "")  # type: ignore[union-attr]
            allowed = wrong_kind(node[name], annotation)
            if not allowed and blank(node[name]) and (name in NAMES or "Path" in annotation):
                allowed = "a text that is not blank" + (", or null" if "None" in annotation else "")
            if allowed:
                yield Problem(f"{key}.{name}", node[name], allowed)


NAMES = {
    *("path", "monitor", "experiment_name", "tracking_uri", "run_name", "run_id", "blacklist", "conservative"),
    "group_column",
    *("prompt_field", "answer_field", "text_field", "split", "gguf_file", "attn_implementation", "revision", "device"),
    *("quantization", "urls", "token_file", "weights_host", "layers", "process_group_backend", "operations"),
}
"""Texts that name something; others, such as a system prompt or the name of a CSV folder, may be blank."""


CHECKED_ELSEWHERE = {
    "data.prompts_per_iteration",
    "data.max_prompt_tokens",
    "rollout.samples",
    "rollout.max_new_tokens",
    "rollout.requests_per_server",
}
"""Numbers that other values are computed from; ``schema.numbers`` checks them further."""


def _targeted(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every block with a ``_target_``, and its dotted key."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if not isinstance(value, Mapping):
            continue
        if "_target_" in value:
            yield key, value
        yield from _targeted(value, f"{key}.")


SUPPLIED = {
    "model.policy": {"loaded"},
    "data": {"tokenizer", "iterations", "seed"},
    "warmup": {"loaded", "datamodule", "seed", "earlier"},
    "module": {"policy", "engine", "reward", "iterations", "seed"},
}
"""Arguments that ``train`` passes itself; in a configuration they would be overwritten, so they are refused there."""


NOT_HANDED_OVER = {"trainer": {"ray"}}
"""Keys of a block that are not arguments of its target."""


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
    configurable = [n for n in named if n not in SUPPLIED.get(key, set())]
    given = _given(key, node)
    if takes_any:
        named += [name for name in given if name not in SUPPLIED.get(key, set())]
    yield from _unknown(key, node, named)
    if node.get("_partial_") or "_args_" in node:
        return
    for name in configurable:
        parameter = parameters[name]
        if parameter.default is parameter.empty and name not in given and not _is_reward_function(key, target):
            yield Problem(f"{key}.{name}", "missing", f"{path} needs it")


def _given(key: str, node: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that a block gives."""
    apart = NOT_HANDED_OVER.get(key, set())
    return [n for n in node if not (n.startswith("_") and n.endswith("_")) and n not in apart]


def _unknown(key: str, node: Mapping[str, Any], named: list[str], who: str = "") -> Iterator[Problem]:
    """Arguments of a block that are not among those ``named`` or that ``train`` supplies itself."""
    configurable = [n for n in named if n not in SUPPLIED.get(key, set())]
    for name in _given(key, node):
        if name not in configurable:
            near = get_close_matches(name, configurable, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            takes = f"{who or node['_target_']} takes: {', '.join(configurable) or 'nothing'}"
            yield Problem(f"{key}.{name}", node[name], f"{guess}{takes}")


def _is_reward_function(key: str, target: Any) -> bool:
    """Whether this is a plain function used as a reward: its first argument, the batch, comes with the call."""
    return key.startswith("reward.") and inspect.isfunction(target)
