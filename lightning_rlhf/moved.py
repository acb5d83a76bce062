"""A run whose folder lies elsewhere by now, alone or together with the folders above it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.run_folder import starts

PATH_KEY = re.compile(r"(^|[._])(path|paths|dir|dirpath|file|files|folder)$")


def moved(config: Mapping[str, Any], run: Path | None, outputs: str, folder: Path) -> dict[str, Any]:
    """The configuration with its paths where they are now.

    * what lay in the run's folder: in ``folder``;
    * where the run's folder was moved together with the folders above it: what lay there, if it was moved too;
    * relative ones, under keys that say path, file or folder: as before, also where the command is typed elsewhere.

    Args:
        config: resolved.
        run: where the run's folder is now.
        outputs: where it was when the checkpoint was written.
        folder: where files go from now on.
    """
    former, shift, command = Path(outputs), _shift(outputs, run), folder_of_command(run, outputs)

    def place(value: str, key: str) -> str:
        path = Path(value)
        if not path.is_absolute():
            elsewhere = command is not None and PATH_KEY.search(key) and value and not path.exists()
            return str(command / path) if elsewhere and (command / path).exists() else value  # type: ignore[operator]
        if path.is_relative_to(former):
            return str(folder / path.relative_to(former))
        if shift is not None and path.is_relative_to(shift[0]):
            there = shift[1] / path.relative_to(shift[0])
            return str(there) if there.exists() else value
        return value

    def walk(node: Any, key: str) -> Any:
        if isinstance(node, Mapping):
            return {name: walk(value, f"{key}.{name}" if key else str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [walk(value, key) for value in node]
        return place(node, key) if isinstance(node, str) else node

    return walk(config, "")


def folder_of_command(run: Path | None, outputs: str) -> Path | None:
    """Where the run was started, if that folder is there, moved or not."""
    recorded = [record["cwd"] for record in starts(run) if "cwd" in record] if run is not None else []
    if not recorded:
        return None
    place, shift = Path(recorded[0]), _shift(outputs, run)
    if shift is not None and place.is_relative_to(shift[0]):
        place = shift[1] / place.relative_to(shift[0])
    return place if place.is_dir() else None


def _shift(outputs: str, run: Path | None) -> tuple[Path, Path] | None:
    """The longest folders above the former and the present place that differ; ``None`` for a run that stayed."""
    before, now = Path(outputs), run
    if now is None or before == now:
        return None
    while before.name == now.name and before.name:
        before, now = before.parent, now.parent
    return before, now
