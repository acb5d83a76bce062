"""The paths of a run whose folder has moved, or that is resumed from another working directory."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.files import spelt_out
from lightning_rlhf.runs.folder import starts

PATH_KEY = re.compile(
    r"(^|[._])(path|paths|dir|dirpath|file|files|folder)$"
    r"|^data\.(train|validation|blacklist|conservative)$|^model\.source\.chat_template$|^model\.policy\.lora\.adapter$"
)


def moved(
    config: Mapping[str, Any], run: Path | None, outputs: str, folder: Path, *, typed: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration with its paths adapted.

    * Paths in the run's former folder now lie in ``folder``.
    * If folders above the run's folder were moved with it, paths below those now lie in the new place, if they exist.
    * Relative paths, under keys that say path, file or folder and those of data, chat template and adapter, keep the
      run's first working directory, also if the command runs in another one where the same name exists.

    Args:
        config: resolved.
        run: the run's present folder.
        outputs: the run's folder when the checkpoint was written.
        folder: output folder from now on.
        typed: keys whose values come from the present command, and so are relative to its working directory.
    """
    former, shift, command = Path(outputs), _shift(outputs, run), folder_of_command(run, outputs)

    def place(value: str, key: str) -> str:
        path = Path(value)
        if former.parts and path.is_relative_to(former):  # both may be relative, if a script gave a relative output_dir
            return str(folder / path.relative_to(former))
        if not path.is_absolute():
            if command is None or not value or not PATH_KEY.search(key) or command == Path.cwd():
                return value
            there = spelt_out((Path.cwd() if key in typed else command) / path)
            return str(there) if _exists(there) else value
        if shift is not None and path.is_relative_to(shift[0]):
            there = shift[1] / path.relative_to(shift[0])
            return str(there) if _exists(there) else value
        return value

    def walk(node: Any, key: str) -> Any:
        if isinstance(node, Mapping):
            return {name: walk(value, f"{key}.{name}" if key else str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [walk(value, key) for value in node]
        return place(node, key) if isinstance(node, str) else node

    return walk(config, "")


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; a chat template's whole text, as a path, is too long to be one."""
    try:
        return path.exists()
    except OSError:
        return False


def folder_of_command(run: Path | None, outputs: str) -> Path | None:
    """The working directory in which the run was started, if that folder still exists, moved or not."""
    recorded = [record["cwd"] for record in starts(run) if "cwd" in record] if run is not None else []
    if not recorded:
        return None
    place, shift = Path(recorded[0]), _shift(outputs, run)
    if shift is not None and place.is_relative_to(shift[0]):
        place = shift[1] / place.relative_to(shift[0])
    return place if place.is_dir() else None


def _shift(outputs: str, run: Path | None) -> tuple[Path, Path] | None:
    """The topmost folders by which the former and the present path differ; ``None`` for a run that was not moved."""
    before, now = Path(outputs), run
    if now is None or before == now:
        return None
    while before.name == now.name and before.name:
        before, now = before.parent, now.parent
    return before, now
