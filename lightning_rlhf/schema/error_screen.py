"""Turn an exception into one screen that says what to change, without heavy imports."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_rlhf.errors import ConfigError, InputError, SettingError
from lightning_rlhf.schema.keys import MIXIN_SETTINGS
from lightning_rlhf.schema.shipped import flatten, groups, homes
from lightning_rlhf.schema.signatures import declared
from lightning_rlhf.schema.spelling import FOREIGN_KEYS, counterpart, hint, respelt
from lightning_rlhf.schema.trainer import REFUSED_TRAINER_OPTIONS
from lightning_rlhf.schema.verl import OURS, PASTED, POLICY_GRADIENT, RENAMED, adopt

HIDDEN = "(full traceback: HYDRA_FULL_ERROR=1)"

COMBINED = ("callbacks",)
"""Groups of which several options can be selected at once."""


def one_screen(error: Exception, arguments: Sequence[str]) -> str:
    """The text shown for an error in the user's input.

    Args:
        error: of this package or of Hydra.
        arguments: the command's arguments after the verb.
    """
    from hydra.errors import OverrideParseException

    if isinstance(error, ConfigError):
        count = len(error.problems)
        return f"The configuration cannot work ({count} problem{'s' * (count > 1)}); nothing was started.\n\n{error}\n"
    if isinstance(error, InputError):
        return f"{error}\n{HIDDEN}\n"
    text = str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override), text)
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return _no_such_key(key[1], arguments)
    gone = re.search(r"Could not delete from config\. '([^']+)' does not exist", text)
    if gone:
        near = hint(gone[1], selected_keys(arguments))
        return f"~{gone[1]}: there is no key {gone[1]!r} to take out" + (f"; {near}" if near else "") + "\n"
    option = re.search(r"Could not (?:find|load) '([^/']+)/([^']+)'", text)
    if option:
        return _no_such_option(option[1], option[2])
    several = re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text)
    if several:
        name, value = several.groups()
        return (
            f"{name}={value} names several values. One run each: --multirun {name}={value}; "
            f"one list: {shlex.quote(f'{name}=[{value}]')}; one text: {quoted(name, value)}\n"
        )
    return f"{text}\n{HIDDEN}\n"


def quoted(name: str, value: str) -> str:
    """An override, quoted for the shell, whose value Hydra reads as a string."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"') if '"' in value else value
    return shlex.quote(f'{name}="{escaped}"')


def _unreadable(override: str, text: str) -> str:
    """Hydra's parser failed: mostly on an unquoted value with characters of its grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    name, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is not allowed: settings are written key=value\n"
    suggestion = quoted(name, value)
    try:
        OverridesParser.create().parse_overrides([shlex.split(suggestion)[0]])
    except OverrideParseException:
        return f"{override!r} cannot be read: {text.splitlines()[0]}\n{HIDDEN}\n"
    if value[:1] in ("[", "{"):
        return f"{override!r} cannot be read: a bracket or quote is open. As one text it is written {suggestion}\n"
    return (
        f"{override!r} cannot be read: the value has characters that need quotes of its own. "
        f"In a shell it is written\n  {suggestion}\n"
    )


def _no_such_option(group: str, name: str) -> str:
    options = groups().get(group, [])
    near = get_close_matches(name, options, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else ""
    kind = name.rpartition(".")[2]
    if group == "data" and kind in options and "." in name:
        guess = f"; a file of your own: data={kind} data.train.path={name}"
    if group == "model" and not near:
        guess = f"; a model of your own: model=hf model.source.path={name}"
    return (
        f"there is no {group}={name}{guess}\n"
        f"Options of {group}: {', '.join(options) or 'none (there is no such group)'}\n"
    )


def _no_such_key(key: str, arguments: Sequence[str]) -> str:
    """An unknown key: another trainer's, one of an option that is not selected, or misspelt."""
    typed = {word.partition("=")[0].lstrip("+~"): word.partition("=")[2] for word in arguments if "=" in word}
    value = typed.get(key, "...")
    parent, _, name = key.rpartition(".")
    if parent == "trainer" and name in REFUSED_TRAINER_OPTIONS:
        acting = REFUSED_TRAINER_OPTIONS[name]
        write = re.match(r"(\w+) is the length of the run", acting)
        return f"{key} is not used here: {acting}" + (f"; write {write[1]}={value}" if write else "") + "\n"
    if key in FOREIGN_KEYS:
        return f"there is no key {key!r}; here it is called {counterpart(FOREIGN_KEYS[key])}\n"
    if key.startswith("algorithm."):
        return _verl_key(key, typed, selected_keys(arguments))
    selected = selected_keys(arguments)
    known = groups()
    for group in get_close_matches(key, known, n=3):
        if value in known[group]:
            return f"there is no key {key!r}; did you mean {group}={value}?\n"
    near = respelt(key, selected) or respelt(key, homes())
    elsewhere = not_selected(near if near and near not in selected else key, value, selected)
    if elsewhere:
        there = "" if key in homes() else f"there is no key {key!r}; "
        return f"{there}{elsewhere}\n"
    guess = hint(key, [*selected, *known])
    text = f"there is no key {key!r}" + (f"; {guess}" if guess else "")
    return f"{text}\nA key of your own is added with +{key}=...; every key: lightning-rlhf train --cfg job\n"


PREFERRED = ("default", "monitor", "jsonl", "hf", "sft", "mlflow")
"""The option to suggest for a group in which several options have a key."""


def not_selected(key: str, value: str, selected: Sequence[str]) -> str:
    """How to use a key of a shipped file that this run does not select; empty for any other key."""
    places = homes().get(key)
    if not places:
        return ""
    group = places[0][0]
    options = list(dict.fromkeys(option for _, option in places))
    option = next((name for name in PREFERRED if name in options), options[0])
    pasted = key.replace(OURS, PASTED, 1)
    if any(name.startswith(f"{PASTED}.") for name in selected) and key.startswith(f"{OURS}."):
        pasted = pasted if pasted in selected else f"+{pasted}"
        return f"this run has the block pasted as {PASTED}; its keys are changed there: {pasted}={value}"
    if group in COMBINED:
        own = key.split(".")[1]
        option = own if own in options else option
        return (
            f"{key} belongs to {group}={option}, which this run does not have; beside the usual ones: "
            f"{group}=[default,{option}] {key}={value}"
        )
    others = f" (or {', '.join(name for name in options if name != option)})" if len(options) > 1 else ""
    return (
        f"{key} belongs to {group}={option}{others}, which this run does not have; with it: "
        f"{group}={option} {key}={value}"
    )


def _verl_key(key: str, typed: dict[str, str], selected: Sequence[str]) -> str:
    """The message for a key of veRL's ``algorithm`` that the pasted block lacks, or given without such a block."""
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    settings = declared(MIXIN_SETTINGS["rollout_correction"])
    if parent == PASTED and settings is not None and name not in (*settings.names, *RENAMED, *POLICY_GRADIENT):
        near = get_close_matches(name, settings.names, n=1)
        guess = f"did you mean {PASTED}.{near[0]}?" if near else f"there are {', '.join(settings.names)}"
        return f"there is no key {key!r}; {guess}\n"
    if any(other.startswith(f"{PASTED}.") for other in selected):
        return (
            f"the pasted block has no key {name!r} yet; it is added with a plus sign: +{key}={typed.get(key, '...')}\n"
        )
    words = [f"{name}={value}" for name, value in typed.items() if name.startswith("algorithm.")]
    try:
        block: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
        _, notes = adopt(block)
    except SettingError as error:
        return f"{error.key}={error.value}: {error.allowed}\n"
    if notes:
        again = " ".join(shlex.quote(f"+{word}") for word in words)
        return (
            f"there is no key {key!r} in this run; a block of veRL is added with a plus sign: {again}\n"
            f"or by our own names: rollout_correction=monitor {' '.join(words).replace(PASTED, OURS)}\n"
        )
    return f"there is no key {key!r}; docs/coming-from-verl-trl-openrlhf.md has what it is called here\n"


def selected_keys(arguments: Sequence[str]) -> list[str]:
    """Every dotted key of the configuration composed from the selected groups, without the other overrides.

    All shipped keys if the groups alone cannot be composed.
    """
    known = groups()
    chosen = [word for word in arguments if word.lstrip("+").partition("=")[0] in known and "=" in word]
    for flag in ("--config-dir", "-cd"):
        if flag in arguments[:-1]:
            folder = Path(arguments[list(arguments).index(flag) + 1]).absolute()
            chosen.append(f"hydra.searchpath=[file://{folder}]")
    return _composed(tuple(chosen))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> list[str]:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
            content = OmegaConf.to_container(hydra.compose("train", overrides=["output_dir=.", *overrides]))
    except HydraException:
        return list(homes())
    return [key for key, _ in flatten(content)]  # type: ignore[arg-type]
