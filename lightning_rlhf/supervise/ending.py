"""In a supervised training: the record of the error that ended it, by which the supervisor need not read its output."""

from __future__ import annotations

import errno
import faulthandler
import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf import passwords
from lightning_rlhf.checkpoint import CheckpointError
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.distributed.first_fault import rank_of
from lightning_rlhf.distributed.processes import place_at_start
from lightning_rlhf.errors import InputError, SettingError
from lightning_rlhf.memory import OutOfMemory, is_out_of_memory
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.rollout.server_pool import ServersGone
from lightning_rlhf.runs.ending import CodeEnded, RunFailed
from lightning_rlhf.runs.own_code import from_own_code
from lightning_rlhf.supervise import classify, files
from lightning_rlhf.supervise.files import Beat

log = logging.getLogger(__name__)

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_OF_SERVERS = {
    *("ConnectionError", "Timeout", "HTTPError"),  # requests
    *("TransportError", "HTTPStatusError"),  # httpx
    *("APIConnectionError", "APIStatusError"),  # clients of model APIs
    *("ClientConnectionError", "ClientResponseError"),  # aiohttp
    *("URLError", "RpcError"),  # urllib, gRPC
}
"""Classes by which libraries say that a server did not answer, or answered with an error: a reward of one's own that
asks a server fails with them. By name, since none of these libraries need be there."""
_LONGEST = 20_000
"""Characters of a traceback that are kept, from its end."""


def begin(config: Mapping[str, Any], *, first: bool) -> None:
    """In each process of a supervised training: its configuration, a first beat, and stacks at SIGUSR2.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.
        first: whether this is rank 0.
    """
    folder = files.supervised()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stacks_on_request(folder)
    if first:
        files.write(folder / files.CONFIG, dict(config))
        Beat(0, "loading", False, time.time(), os.getpid(), 0).write(folder)


def stacks_on_request(folder: Path) -> None:
    """Write the stacks of all threads at SIGUSR2, even while the main thread runs no Python.

    Again after each fit and validation, where Lightning restores the handlers that it knows.
    """
    # The file stays open: the handler writes to its descriptor.
    stacks = (folder / files.STACKS.format(pid=os.getpid())).open("a", encoding="utf-8")
    faulthandler.unregister(signal.SIGUSR2)  # otherwise a handler that Lightning has taken out counts as registered
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


@contextmanager
def recorded() -> Iterator[None]:
    """Context whose error is recorded for the supervisor, if there is one and no other process has recorded one."""
    try:
        yield
    except Exception as error:
        folder = files.supervised()
        if folder is not None:
            _write(folder, error)
        raise


def _write(folder: Path, error: Exception) -> None:
    """The first error of all processes stays, as those of others often follow from it.

    Unless the one that started them says that one was killed: the others report no more than a lost connection.
    """
    kind = kind_of(error)
    earlier = files.read(folder / files.END) or {}
    is_cause = (
        isinstance(error, RunFailed) and kind == "killed" and earlier.get("class") in ("communication", "unknown")
    )
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_LONGEST:]
    content = {
        "class": kind,
        "exception": type(error).__name__,
        "message": passwords.hidden(": ".join(filter(None, [getattr(error, "called_as", ""), str(error)]))),
        "origin": passwords.hidden(str(getattr(error, "origin", ""))),
        "traceback": passwords.hidden(trace),
        "rank": rank_of(error, place_at_start()[0]),
        "time": time.time(),
    }
    own = folder / f".{files.END}.{os.getpid()}"
    try:
        own.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        if is_cause:
            os.replace(own, folder / files.END)
        else:
            with suppress(FileExistsError):
                os.link(own, folder / files.END)
    except OSError as failure:
        log.warning("the error was not recorded for the supervisor: %s", failure)
    finally:
        own.unlink(missing_ok=True)


def kind_of(error: BaseException) -> str:
    """The class of an error, one of :data:`lightning_rlhf.supervise.classify.CLASSES`.

    What an error was raised from counts as well: a reward that ran out of memory is out of memory.
    """
    chain = list(_chain(error))
    for matches, kind in (
        (lambda e: isinstance(e, (MemoryError, OutOfMemory)) or is_out_of_memory(e), "out_of_memory"),
        (lambda e: isinstance(e, OSError) and e.errno in _DISK, "disk"),
        (_is_divergence, "divergence"),
        (lambda e: isinstance(e, CheckpointError), "disk"),
        (lambda e: isinstance(e, (InputError, SettingError, HydraException, OmegaConfBaseException)), "configuration"),
        (_is_communication, "communication"),
    ):
        if any(matches(each) for each in chain):
            return kind
    if isinstance(error, RunFailed):  # of other processes, which may have left no record
        return classify.by_text(str(error)) or "unknown"
    if isinstance(error, (RewardError, CodeEnded)) or from_own_code(error):
        return classify.USER_CODE
    if any(isinstance(each, PermissionError) for each in chain):
        return "disk"
    return classify.by_text(f"{type(error).__name__}: {error}") or "unknown"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_divergence(error: BaseException) -> bool:
    if isinstance(error, CheckpointError):
        return "not finite" in str(error)
    return isinstance(error, (TrainingFailed, FloatingPointError))


def _is_communication(error: BaseException) -> bool:
    kinds: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError, ServersGone)
    distributed = tuple(getattr(torch.distributed, name, None) for name in ("DistError", "DistNetworkError"))
    known = kinds + tuple(kind for kind in distributed if kind is not None)
    return isinstance(error, known) or any(kind.__name__ in _OF_SERVERS for kind in type(error).__mro__)
