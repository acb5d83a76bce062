"""The paths of a run that has moved, or that goes on from another folder than it was started in."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.runs.folder import starts

PATH_KEY = re.compile(r"(^|[._])(path|paths|dir|dirpath|file|files|folder)$|^data\.(train|validation)$")


def moved(
    config: Mapping[str, Any], run: Path | None, outputs: str, folder: Path, *, typed: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration with its paths where they are now.

    * what lay in the run's folder: in ``folder``;
    * where the run's folder was moved together with the folders above it: what lay there, if it was moved too;
    * relative ones, under keys that say path, file or folder: as before, also where the command is typed elsewhere,
      and where something of that name lies there, too.

    Args:
        config: resolved.
        run: where the run's folder is now.
        outputs: where it was when the checkpoint was written.
        folder: where files go from now on.
        typed: keys whose values come from the present command, which count from its own folder.
    """
    former, shift, command = Path(outputs), _shift(outputs, run), folder_of_command(run, outputs)

    def place(value: str, key: str) -> str:
        path = Path(value)
        if former.parts and path.is_relative_to(former):  # both may be relative, where a script gave output_dir so
            return str(folder / path.relative_to(former))
        if not path.is_absolute():
            if command is None or not value or not PATH_KEY.search(key) or command == Path.cwd():
                return value
            there = (Path.cwd() if key in typed else command) / path
            return str(there) if there.exists() else value
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
