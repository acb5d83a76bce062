"""The first fault of several processes: what each shows and records when one of them has failed.

A process that fails writes why into the run's folder before its connections close. The others then find those closed,
read the file, and name its process as the cause instead of a lost connection.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_rlhf.errors import RunEnded

log = logging.getLogger(__name__)

FILE = "first_fault.json"
"""In the output folder: process and error of the first fault of the newest start that had one."""

TIMEOUT_KEY = "trainer.strategy.timeout_seconds"

_TIMEOUT = ("timed out", "timeout", "time out")
_GONE = ("closed", "reset by peer", "broken pipe", "remote process", "refused", "remoteerror")


class PeerFailed(RunEnded):
    """Another process of the run has failed or is gone, so this one cannot go on."""


class RanksTimedOut(RunEnded):
    """This process has waited for another for longer than the process group allows."""


def broken_connection(error: BaseException) -> Literal["timeout", "gone"] | None:
    """Whether an error is a process group's own: it has waited too long, or another process is gone.

    gloo raises plain RuntimeErrors with the path of its source; NCCL and the store have error classes.
    """
    text = str(error).lower()
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo/" in text):
        return None
    if any(word in text for word in _TIMEOUT):
        return "timeout"
    return "gone" if any(word in text for word in _GONE) else None


# --- the file --------------------------------------------------------------------------------------------------------


def this_start() -> str:
    """The same in all processes of one start of a run, and another at its next start."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(os.environ.get(name, "") for name in names)


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Write this process's fault, unless another process of this start has written one before.

    An error that all ranks raise together is recorded as that of the rank on which it arose. On a full disk and the
    like there is a warning only: the fault itself is raised anyway.
    """
    try:
        _record(folder, rank, error)
    except OSError as unwritten:
        log.warning("process %d: its error is not recorded in %s: %s", rank, folder / FILE, unwritten)


def rank_of(error: BaseException, rank: int) -> int:
    """The rank on which an error arose; ``rank``, that of this process, unless ranks have exchanged it."""
    return int(getattr(error, "of_rank", rank))


def _record(folder: Path, rank: int, error: BaseException) -> None:
    fault = {
        "start": this_start(),
        "rank": rank_of(error, rank),
        "error": " ".join(f"{type(error).__name__}: {error}".split()),
    }
    own = folder / f"{FILE}.{rank}"
    own.write_text(json.dumps(fault), encoding="utf-8")
    try:
        os.link(own, folder / FILE)  # fails if it exists: of two processes one is the first
    except OSError:
        if read(folder) is None:  # it is of an earlier start, or the file system has no links
            own.replace(folder / FILE)
    finally:
        own.unlink(missing_ok=True)


def read(folder: Path, *, any_start: bool = False) -> tuple[int, str] | None:
    """Rank and error of the first fault of this start; ``None`` if no process could record one.

    Args:
        folder: of the run.
        any_start: for the process that started the others, which is in none of their starts.
    """
    try:
        fault = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not any_start and fault["start"] != this_start():
        return None
    return int(fault["rank"]), str(fault["error"])


# --- in the processes ------------------------------------------------------------------------------------------------


@contextmanager
def named(folder: Path, rank: int, world: int, settings: Mapping[str, Any]) -> Iterator[None]:
    """Context of one of several processes: records its first error, and replaces an error of the process group.

    Args:
        folder: of the run.
        rank: of this process.
        world: number of processes; with one, nothing is recorded.
        settings: the block ``trainer`` of the configuration.

    Raises:
        PeerFailed: another process has failed or is gone.
        RanksTimedOut: another process did not come in time.
    """
    try:
        yield
    except (PeerFailed, RanksTimedOut):  # by an inner one
        raise
    except Exception as error:
        if world == 1:
            raise
        kind = broken_connection(error)
        first = read(folder)
        if kind is None:
            record(folder, rank, error)
            raise
        if first is not None and first[0] != rank:
            raise PeerFailed(f"ended, as process {first[0]} has failed: {first[1]}") from error
        if kind == "gone":
            what = f"ended {_where(error)}, as another process of the run is gone without a word (killed?)"
            raise PeerFailed(f"{what}: {_short(error)}") from error
        strategy = settings.get("strategy")
        limit = strategy.get("timeout_seconds") if isinstance(strategy, Mapping) else None
        late = RanksTimedOut(
            f"has waited {_where(error)} for another process for longer than {TIMEOUT_KEY} = {limit} s allows: one "
            "hangs, or is that much slower (a larger value lets this one wait). What the process group said: "
            f"{_short(error)}"
        )
        record(folder, rank, late)
        raise late from error


def watch(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Use :func:`named` inside the Trainer, so that loggers and callbacks get the error that it raises.

    Args:
        trainer: of several processes; nothing is changed otherwise.
        settings: the block ``trainer`` of the configuration.
    """
    if trainer.world_size == 1:
        return
    launcher = trainer.strategy.launcher or _InThisProcess()
    launch = launcher.launch

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with named(Path(trainer.default_root_dir), trainer.global_rank, trainer.world_size, settings):
            return launch(function, *args, **kwargs)

    launcher.launch = watched  # type: ignore[method-assign]
    trainer.strategy._launcher = launcher


class _InThisProcess(_Launcher):
    """For a strategy that has none where another program has started the processes."""

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Nothing to end."""


def _where(error: BaseException) -> str:
    """The collective operation and the phase in which an error arose, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    collectives = [f.name for f in frames if f.filename.endswith("distributed_c10d.py") and not f.name.startswith("_")]
    exchange = collectives[0] if collectives else "an exchange of tensors"
    phase = getattr(error, "phase", None)
    if phase is None:
        known = {"/checkpoint/": "checkpoint writing", "validation.py": "validation"}
        files = [frame.filename for frame in reversed(frames)]
        phase = next((known[part] for file in files for part in known if part in file), "set-up")
    return f"in {exchange} ({phase})"


def _short(error: BaseException, longest: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= longest else text[:longest] + "..."


def forget(folder: Path) -> None:
    """Remove the record of an earlier start."""
    with suppress(FileNotFoundError):
        (folder / FILE).unlink()
