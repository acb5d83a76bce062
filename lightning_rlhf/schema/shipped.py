"""Groups, options and keys of the shipped configuration files, read as text, without heavy imports."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of all leaves; an empty block is a leaf."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def groups() -> dict[str, list[str]]:
    """Every configuration group with its options."""
    root = importlib.resources.files("lightning_rlhf.conf")
    folders = sorted((e for e in root.iterdir() if e.is_dir() and not e.name.startswith("_")), key=lambda e: e.name)
    return {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in folders
    }


def train_file() -> dict[str, Any]:
    """``conf/train.yaml``, not composed."""
    return _yaml(importlib.resources.files("lightning_rlhf.conf") / "train.yaml")


@functools.cache
def homes() -> dict[str, list[tuple[str, str]]]:
    """Every dotted key of the shipped files with the (group, option) files that have it; empty for ``train.yaml``."""
    root = importlib.resources.files("lightning_rlhf.conf")
    top = {name: value for name, value in train_file().items() if name not in ("defaults", "hydra")}
    found: dict[str, list[tuple[str, str]]] = {key: [] for key, _ in flatten(top)}
    for group, options in groups().items():
        for option in options if group not in ("experiment", "recipe") else ():
            file = root / group / f"{option}.yaml"
            content = {name: value for name, value in _yaml(file).items() if name != "defaults"}
            for key, _ in flatten(content):
                found.setdefault(f"{_package(file, group)}.{key}", []).append((group, option))
    return found


def shipped_keys() -> list[str]:
    """Every dotted key of the shipped configuration files, for spelling hints."""
    return list(homes())


def comment(key: str, target: str | None = None) -> str:
    """The comment above a key in a shipped file that has the key; empty if there is none.

    Args:
        key: dotted.
        target: ``_target_`` of the key's block: files with another one there say nothing about it.
    """
    places = homes().get(key)
    root = importlib.resources.files("lightning_rlhf.conf")
    for group, option in places or ():
        file = root / group / f"{option}.yaml"
        names = key.removeprefix(f"{_package(file, group)}.").split(".")
        if target is not None and dict(flatten(_yaml(file))).get(".".join([*names[:-1], "_target_"])) != target:
            continue
        lines, depth = file.read_text(encoding="utf-8").splitlines(), 0
        for number, line in enumerate(lines):
            if line.startswith(f"{'  ' * depth}{names[depth]}:"):
                depth += 1
                if depth == len(names):
                    above = lines[number - 1].strip() if number else ""
                    return above.removeprefix("# ") if above.startswith("# ") else ""
    return ""


def known_at_the_top() -> list[str]:
    """Top-level names of a configuration: keys of ``train.yaml`` and the groups placed there."""
    train = train_file()
    placed = [
        name.removeprefix("optional ") for entry in train["defaults"] if isinstance(entry, dict) for name in entry
    ]
    return [name for name in train if name not in ("defaults", "hydra")] + [
        name for name in placed if not _fills_another_block(name)
    ]


def _fills_another_block(group: str) -> bool:
    """Whether a group's files say by ``# @package`` that their keys belong elsewhere."""
    root = importlib.resources.files("lightning_rlhf.conf")
    return all(_package(root / group / f"{option}.yaml", group) != group for option in groups()[group])


def _package(file: Any, group: str) -> str:
    """The package of a shipped file: the block of the configuration that its keys belong to."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# @package ") if first.startswith("# @package ") else group


def _yaml(file: Any) -> dict[str, Any]:
    """A shipped file, not composed, interpolations unresolved."""
    return OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8"))) or {}  # type: ignore[return-value]
