"""The folder of a run: owned by one run, locked by one command at a time, with a list of its starts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_rlhf import passwords
from lightning_rlhf.files import as_file, ensure_line_end, write_whole
from lightning_rlhf.schema import InputError

STARTS = "starts.jsonl"
"""File in the folder: one line per start with its overrides, the changes, and the checkpoint it continued from."""

LOCK = ".lock"

_held: set[Path] = set()


# --- a new one -------------------------------------------------------------------------------------------------------


def claim(path: str | Path) -> Path:
    """Create a new folder: ``path``, or ``path-2``, ``path-3``, ... if another process has created it already."""
    path, number = Path(path), 1
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


class ClaimFolder(Callback):
    """Hydra callback that gives each run or sweep a new folder if the folder is named by the time.

    Otherwise two commands of the same second would share it. A folder that the user names is used as it is.
    """

    def on_run_start(self, config: DictConfig, **options: Any) -> None:
        """Called before Hydra creates the folder of a run."""
        _claim_key(config, "run")
        if any(passwords.keys_with(OmegaConf.to_container(config, resolve=False))):  # type: ignore[arg-type]
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.output_subdir = None  # the run is refused; Hydra would save the password before that

    def on_multirun_start(self, config: DictConfig, **options: Any) -> None:
        """Called before Hydra creates the folder of a sweep."""
        _claim_key(config, "sweep")


def quoted(value: object) -> str:
    """A value quoted for a Hydra override, whatever characters it has."""
    # In quotes Hydra reads a backslash literally, except before a quote.
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", str(value))
    return "'" + re.sub(r"\\+$", lambda found: found[0] * 2, text) + "'"


claimed: set[Path] = set()
"""Folders that this process has created, and that are therefore new."""


def _claim_key(config: DictConfig, key: str) -> None:
    written = OmegaConf.to_container(config.hydra[key], resolve=False)
    if "${now:" in str(written["dir"]):  # type: ignore[index, call-overload]
        folder = claim(config.hydra[key].dir)
        claimed.add(folder.absolute())
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra[key].dir = str(folder)
            config.hydra.overrides.hydra.append(f"hydra.{key}.dir={quoted(folder)}")  # for the jobs of a sweep


def remove_unused() -> None:
    """Remove the folders claimed by this process that hold no more than Hydra writes before a run: it was refused."""
    for folder in list(claimed):
        files = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if not path.is_dir()}
        log = folder / "train.log"
        if files <= {".hydra", "train.log", "multirun.yaml", LOCK} and not (log.exists() and log.stat().st_size):
            shutil.rmtree(folder, ignore_errors=True)
        claimed.discard(folder)


# --- ownership and lock ----------------------------------------------------------------------------------------------


def refuse_a_second_run(*folders: str | Path | None) -> None:
    """Refuse a new run in a folder with another run's checkpoints.

    Raises:
        InputError: one of the folders holds checkpoints.
    """
    for folder in (folder for folder in folders if folder):
        for there in (Path(folder) / "checkpoints", Path(folder)):
            found = sorted(path.name for path in there.glob("[!.]*.ckpt"))
            if found:
                raise InputError(
                    f"{there} holds the checkpoints of a run already ({', '.join(found[-2:])}). resume={folder} goes "
                    "on with it (resume=latest lets the same command go on where it stopped); a new run needs a "
                    "folder of its own: hydra.run.dir=FOLDER"
                )


_COMMAND, _TRAINER = 0, 1
"""Bytes of the lock file: one is locked by the command, one by the first of the processes that it has started."""


@contextmanager
def locked(folder: str | Path, key: str = "hydra.run.dir") -> Iterator[None]:
    """Lock the folder against other training processes; the lock ends with the process, however it ends.

    Args:
        folder: of a run, or of checkpoints outside of a run's folder.
        key: that takes another folder.

    Raises:
        InputError: another process holds the lock, or trains in the folder (:func:`trained_here`), or the folder cannot
            be written to.
    """
    path = Path(folder).absolute() / LOCK
    if path in _held:  # the operating system's lock does not exclude the process that holds it
        raise InputError(f"{path.parent}: a run of this process is at work in this folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+")
    except OSError as error:
        raise InputError(f"{path.parent} cannot be used ({error}); take another folder with {key}=FOLDER") from error
    with opened as file:
        for byte in (_TRAINER, _COMMAND):
            _lock(file, byte, key)
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _TRAINER)
        _held.add(path)
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            yield
        finally:
            _held.discard(path)


@contextmanager
def trained_here(folder: str | Path, *, first: bool) -> Iterator[None]:
    """In a process that the command has started: the folder stays locked until it ends, if the command ends before it.

    Args:
        folder: of the run.
        first: whether this is rank 0; other processes lock nothing.

    Raises:
        InputError: the first process of another start still trains there.
    """
    if not first:
        yield
        return
    with (Path(folder).absolute() / LOCK).open("a+") as file:
        _lock(file, _TRAINER, "hydra.run.dir")
        file.write(f"its first process {os.getpid()}\n")
        file.flush()
        yield


def _lock(file: IO[str], byte: int, key: str) -> None:
    try:
        # A lock of the process, not of the open file: forked processes do not keep it alive.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        file.seek(0)
        who = ", ".join(file.read().split("\n")).strip(", ") or "elsewhere"
        raise InputError(
            f"{Path(file.name).parent}: another run is at work in this folder ({who}); "
            f"wait for its end, or take another folder with {key}=FOLDER"
        ) from error


# --- its starts ------------------------------------------------------------------------------------------------------


def starts(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of :func:`note_start` in a folder, oldest first; half-written and other broken lines are left out.

    Raises:
        FolderInPlaceError: a folder has the name of the list.
    """
    path = as_file(Path(folder) / STARTS)
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def checkpoint_folder(config: Mapping[str, Any]) -> Path:
    """The folder of a run's checkpoints, whichever callback writes them."""
    blocks = (config.get("callbacks") or {}).values()
    places = [block["dirpath"] for block in blocks if isinstance(block, Mapping) and block.get("dirpath")]
    return Path(places[0] if places else Path(config["output_dir"]) / "checkpoints").expanduser().absolute()


def owner_of(checkpoints: Path) -> Path:
    """The folder whose lock protects these checkpoints: that of the run they lie in, or their own."""
    return checkpoints.parent if (checkpoints.parent / STARTS).exists() else checkpoints


def refuse_another_runs(folder: str | Path, checkpoint: Path, writer: str | Path) -> None:
    """Refuse a checkpoint of another run that keeps its checkpoints in the same place as this one.

    Args:
        folder: of the run that is to go on.
        checkpoint: the newest that was found for it.
        writer: the output folder of the run that wrote it, as the checkpoint says.

    Raises:
        InputError: it is another one. A folder that was moved since it was written is not another one.
    """
    own, other, here = Path(folder).absolute(), Path(writer).absolute(), checkpoint.absolute()
    if own.resolve() == other.resolve() or kept_elsewhere(other) != here.parent:
        return
    if any(record.get("checkpoint") == str(here) for record in starts(own)):  # it went on from that one in a new folder
        return
    raise InputError(
        f"{here} was written by the run in {other}, not by that in {own}, which keeps its checkpoints there, too: "
        f"resume={other} goes on with that one; this one begins anew with a callbacks.checkpoint.dirpath of its own"
    )


def kept_elsewhere(folder: str | Path) -> Path | None:
    """The checkpoint folder of a run's newest start, if it is outside of the run's folder."""
    recorded = [record.get("checkpoints") for record in starts(folder)][-1:]
    return Path(recorded[0]) if recorded and recorded[0] else None


def note_start(folder: str | Path, record: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
    """Add a start to the list, with its number, the time and the folder of the command.

    Args:
        folder: of the run.
        record: further entries about the start.
        config: its configuration, if Hydra has not written it: that of the first start goes to Hydra's place
            (``.hydra/config.yaml``), that of a later one into ``.hydra/start_2``, ...
    """
    number = len(starts(folder)) + 1
    numbered = {"start": number, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cwd": os.getcwd()}
    path = Path(folder) / STARTS
    path.parent.mkdir(parents=True, exist_ok=True)
    ensure_line_end(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(numbered | dict(record), ensure_ascii=False, default=str) + "\n")
    if config is not None:
        written = path.parent / ".hydra"
        if written.exists() or number > 1:
            written /= f"start_{max(number, 2)}"
        written.mkdir(parents=True, exist_ok=True)
        texts: dict[str, Any] = {"config.yaml": dict(config), "overrides.yaml": list(record.get("overrides", []))}
        for name, content in texts.items():
            write_whole(written / name, OmegaConf.to_yaml(OmegaConf.create(content)))
