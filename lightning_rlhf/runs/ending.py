"""Messages for a run that ended early: the cause, its folder and newest checkpoint, and the command to resume."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rlhf.checkpoint.files import CheckpointError, iteration_of
from lightning_rlhf.checkpoint.records import problem_of
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.distributed.first_fault import PeerFailed, RanksTimedOut
from lightning_rlhf.distributed.processes import is_first
from lightning_rlhf.interruption import Interrupted, from_signal
from lightning_rlhf.reporting import terminal
from lightning_rlhf.reporting.terminal import note, say
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.rollout.server_pool import ServersGone
from lightning_rlhf.runs.folder import checkpoint_folder, kept_elsewhere, starts
from lightning_rlhf.runs.own_code import from_own_code, in_words, own_calls
from lightning_rlhf.schema import InputError

PEERS = (PeerFailed, RanksTimedOut)


class RunFailed(RuntimeError):
    """A run has failed in other processes, which have printed the cause; this message needs no traceback."""


class CodeEnded(RuntimeError):
    """Code that a run calls has raised what ends a process without a word, such as SystemExit."""

    origin = ""
    """The calls of the user's own code that raised it, as lines of a traceback."""


@contextmanager
def failing() -> Iterator[None]:
    """Context in which an exception ends a run as a failure, unless a signal raised it.

    Raises:
        CodeEnded: in place of a SystemExit, a KeyboardInterrupt or the like.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        cause = error.__context__ if isinstance(error, SystemExit) else None
        raised = cause if isinstance(cause, KeyboardInterrupt) else error  # for which Lightning calls exit()
        if from_signal(raised):
            raise
        failure = CodeEnded(f"{raised!r} was raised, which ends a process and not a run")
        failure.origin = own_calls(raised)
        raise failure from raised


@contextmanager
def told(config: Mapping[str, Any], *, speaks: bool) -> Iterator[None]:
    """Context of a run: if it ends early, tell the user how to resume.

    With an error this is added as notes below its traceback.

    Args:
        config: plain containers, as returned by :func:`lightning_rlhf.schema.check`.
        speaks: whether this process prints for the whole run.
    """
    try:
        yield
    except Interrupted as stop:
        if speaks:
            say("\n".join([f"stopped by {stop}", *how_to_go_on(config)]))
        stop.told = True
        raise
    except InputError as error:
        if speaks:
            note(str(error))
        raise
    except Exception as error:
        lines = ["the run has FAILED", *how_to_go_on(config)]
        if speaks:
            note("".join(traceback.format_exception(type(error), error, error.__traceback__)) + "\n".join(lines))
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note("\n".join(lines))
        elif speaks:
            print("\n".join(lines), file=sys.stderr, flush=True)
        raise


def how_to_go_on(config: Mapping[str, Any]) -> list[str]:
    """The run's folder, its newest checkpoint and the command that resumes it."""
    output = Path(config["output_dir"]).absolute()
    lines = [f"output folder: {output}"]
    folder = checkpoint_folder(config)
    found = [path for path in folder.glob("*.ckpt") if iteration_of(path) >= 0 and problem_of(path) is None]
    resumed = config.get("resume") if config.get("resume") != "latest" else None
    newest = max(found, key=iteration_of) if found else None
    if newest is not None and (resumed is None or newest != Path(resumed).absolute()):
        where = output if folder in (output / "checkpoints", kept_elsewhere(output)) else folder
        return [*lines, f"newest checkpoint: {newest}", f"to go on: {resume_command(where)}"]
    if resumed is not None:
        again = resume_command(resumed, _said_at_this_start(config))
        return [*lines, "no checkpoint since it was resumed", f"to go on: {again}"]
    return [*lines, "no checkpoint yet: nothing to go on from"]


def _said_at_this_start(config: Mapping[str, Any]) -> list[str]:
    """Overrides given beside ``resume`` at this start: no checkpoint records them yet."""
    recorded = starts(config["output_dir"])[-1:]
    words = [word for word in (recorded[0].get("typed", []) if recorded else []) if not word.startswith("resume=")]
    if config.get("resume_on_other_data") and "resume_on_other_data=true" not in words:
        words.append("resume_on_other_data=true")
    return words


def resume_command(where: Path | str, words: Iterable[str] = ()) -> str:
    """The command that resumes a run, quoted for shell and Hydra.

    Args:
        where: the run's folder or a checkpoint.
        words: further overrides, as given to the earlier command.
    """
    plain = re.fullmatch(r"[\w./+-]+", str(where))
    escaped = str(where).replace('"', '\\"')
    where = f"resume={where}" if plain else shlex.quote(f'resume="{escaped}"')
    return " ".join(["lightning-rlhf train", where, *map(shlex.quote, words)])


def in_short(error: Exception) -> str | None:
    """Text for a failure in place of a traceback: its message and where the user's own code raised it.

    ``None`` if the error does not explain itself, such as one inside this package: that needs its traceback.
    """
    if isinstance(error, (TrainingFailed, CheckpointError, RunFailed, RewardError, ServersGone, CodeEnded, *PEERS)):
        origin = getattr(error, "origin", "")
        return f"{error}\n{origin}" if origin else str(error)
    if isinstance(error, InputError) or not from_own_code(error):
        return None
    return "\n".join([in_words(error), own_calls(error)]).rstrip("\n")


def report_of_process(name: str, error: Exception, folder: Path) -> None:
    """Print why one of several processes has failed; the one that started them says how to go on.

    The full traceback of a shortened error is in ``train.log``, written here unless :func:`told` has done it.

    Args:
        name: of the process, for the user.
        error: what ended it.
        folder: of the run.
    """
    full, short = "".join(traceback.format_exception(type(error), error, error.__traceback__)), in_short(error)
    if short is not None and not is_first() and (from_own_code(error) or isinstance(error, RewardError)):
        with (folder / terminal.FILE).open("a", encoding="utf-8") as file:
            file.write(f"{name}:\n{full}")
    print(f"{name}:\n{full}" if short is None else f"{name}: {short}", file=sys.stderr, flush=True)
