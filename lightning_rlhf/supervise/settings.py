"""The settings of a supervisor: ``conf/supervise.yaml``, a file of the user's, words of the command."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.bounds import bounded
from lightning_rlhf.errors import InputError, SettingError
from lightning_rlhf.supervise.classify import CLASSES

BACK = "back"
"""The key of a step that is no key of the run."""
FACTOR = re.compile(r"\*\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")

Step = Mapping[str, Any]
"""Changes that are tried together."""


@dataclass(frozen=True)
class Settings:
    """The keys of ``conf/supervise.yaml``, which explains them.

    Raises:
        SettingError: names key, value and what is allowed.
    """

    retries: int
    renew_after: int
    soon: int
    wait: float
    hang_after: float | None
    hang_factor: float
    start_within: float | None
    log_lines: int
    notify: Sequence[str]
    policy: Mapping[str, Sequence[Step]]

    def __post_init__(self) -> None:
        at_least_0 = {name: getattr(self, name) for name in ("retries", "soon", "log_lines")}
        bounded("supervise", at_least=0, whole=True, **at_least_0)
        bounded("supervise", at_least=1, whole=True, renew_after=self.renew_after)
        bounded("supervise", at_least=0, wait=self.wait)
        bounded("supervise", at_least=1, hang_factor=self.hang_factor)
        bounded("supervise", above=0, optional=True, hang_after=self.hang_after, start_within=self.start_within)
        if not isinstance(self.notify, list) or not all(isinstance(each, str) and each for each in self.notify):
            raise SettingError("supervise.notify", "***", "a list of addresses, such as [json://localhost:8000/]")
        if not isinstance(self.policy, dict):
            raise SettingError("supervise.policy", self.policy, "a block: class -> list of steps")
        for kind, steps in self.policy.items():
            _check_steps(f"supervise.policy.{kind}", kind, steps)


def _check_steps(key: str, kind: str, steps: Any) -> None:
    if kind not in CLASSES:
        raise SettingError(key, steps, f"the classes are {', '.join(CLASSES)}")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise SettingError(key, steps, "a list of steps, each a block such as {} or {module.actor.lr: '* 0.5'}")
    for step in steps:
        for name, value in step.items():
            if name == BACK:
                allowed, fits = "true or false", isinstance(value, bool)
            else:
                allowed = "a key of the run with a number, a text, true or false; a text '* 0.5' multiplies"
                fits = bool(re.fullmatch(r"[A-Za-z_][\w.]*", str(name))) and isinstance(value, (bool, int, float, str))
                if isinstance(value, str) and value.lstrip().startswith("*"):
                    fits = fits and FACTOR.fullmatch(value.strip()) is not None
            if not fits:
                raise SettingError(f"{key}: {name}", value, allowed)


def read(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings that a command asks for, and its words for ``train``.

    Raises:
        InputError: a file that cannot be read, an unknown key, or a word that cannot be read.
        SettingError: a value that is not allowed.
    """
    own = [word for word in arguments if word.startswith(("supervise=", "supervise."))]
    shipped = importlib.resources.files("lightning_rlhf.conf") / "supervise.yaml"
    config: dict[str, Any] = _plain(OmegaConf.create(shipped.read_text("utf-8")))
    known = [field.name for field in fields(Settings)]
    for word in own:
        key, equals, value = word.partition("=")
        if not equals or not value.strip():
            raise InputError(f"{key} is not allowed without a value: supervise=FILE or supervise.KEY=VALUE")
        shown = "***" if key == "supervise.notify" else value
        try:
            dotted = f"{key.removeprefix('supervise.')}={value}"
            given = _plain(_file(Path(value).expanduser()) if key == "supervise" else OmegaConf.from_dotlist([dotted]))
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            if shown != value:  # not even in a traceback
                raise InputError(f"{key} = {shown} is not allowed: quote each address, ['json://...']") from None
            raise InputError(f"{key} = {shown} is not allowed: {str(error).splitlines()[0]}") from error
        unknown = [str(name) for name in given if str(name) not in known]
        if unknown:
            from lightning_rlhf.schema.spelling import hint

            near = hint(unknown[0], known)
            raise InputError(f"there is no key supervise.{unknown[0]}" + (f"; {near}" if near else ""))
        if isinstance(given.get("policy"), dict):
            given["policy"] = config["policy"] | given["policy"]
        config |= given
    if isinstance(config["notify"], str):
        config["notify"] = [config["notify"]]
    return Settings(**config), [word for word in arguments if word not in own]


def _plain(config: Any) -> Any:
    """In plain containers, interpolations such as ``${oc.env:NAME}`` resolved."""
    return OmegaConf.to_container(config, resolve=True)


def _file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"supervise = {str(path)!r} cannot be read: {error.strerror}") from error
    content = OmegaConf.create(text)
    if not OmegaConf.is_dict(content):
        raise InputError(f"supervise = {str(path)!r} is not allowed: a file of the form of conf/supervise.yaml")
    return content
