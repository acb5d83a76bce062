"""Several processes as ranks of one job on a CPU, as ``torchrun`` sets them up: one call runs a function on each.

    def work(rank: int, scale: float) -> list[float]:  # at the top of a test file
        return all_reduce_sum(torch.full((2,), scale * rank)).tolist()

    def test_it(tmp_path):
        first, second = run_ranks(work, 2.0, folder=tmp_path)

The ranks are forked from a process that has done the imports of ``tests.support``, about ten seconds of a core, so only
the first call of a session pays for them.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 60
"""A rank that waits this long for another one fails."""
GRACE_SECONDS = 5
"""Seconds in which the other ranks may end by themselves after one has failed."""


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    world_size: int = 2,
    process_group: bool = True,
    ends: Sequence[int] | None = None,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each rank.

    ``function`` stands at the top of a module (it is pickled by name, arguments and results by value). Each process has
    one thread, the variables that ``torchrun`` sets, and ``folder`` as working directory and for its output
    (``rank_0.log``, ...).

    Args:
        folder: an existing folder that no other call uses.
        process_group: whether a gloo group exists when ``function`` begins; without it, Lightning or ``function``
            creates one from the environment.
        ends: expected exit code of each rank, 0 if not given; -9 for one that kills itself, whose result is ``None``.
        environment: more variables, set before the module of ``function`` is imported.
        timeout: seconds for everything; then each rank prints where it is and all are killed.

    Raises:
        AssertionError: a rank ended otherwise; the message holds the last output of each.
    """
    expected = list(ends or [0] * world_size)
    # The store lives here, on a port that the kernel chose, so that nobody can take the port before a rank does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(environment or {}),
    }
    # As bytes: multiprocessing would hand tensors over as shared memory.
    call = pickle.dumps((function, arguments))
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support"])
    ranks = [
        context.Process(target=_rank, args=(rank, shared, folder, call, process_group, timeout))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        _wait(ranks, expected, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    ended = [process.exitcode for process in ranks]
    assert ended == expected, f"the ranks ended with {ended}, expected {expected}\n" + _said(folder, world_size)
    paths = [folder / f"rank_{rank}.pickle" for rank in range(world_size)]
    return [pickle.loads(path.read_bytes()) if path.is_file() else None for path in paths]


def _wait(ranks: list[Any], expected: list[int], timeout: float) -> None:
    """Wait until all have ended, or one has ended in an unexpected way."""
    deadline = time.monotonic() + timeout
    failed = False
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        connection.wait(running, left)
        ended = [process.exitcode for process in ranks]
        if not failed and any(code not in (None, wanted) for code, wanted in zip(ended, expected, strict=True)):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)


def _said(folder: Path, world_size: int) -> str:
    logs = [(folder / f"rank_{rank}.log").read_text(errors="replace")[-3000:] for rank in range(world_size)]
    return "\n".join(f"--- rank {rank}\n{log}" for rank, log in enumerate(logs))


def _rank(rank: int, shared: dict[str, str], folder: Path, call: bytes, process_group: bool, timeout: float) -> None:
    os.chdir(folder)
    log = os.open(f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)  # a crash of native code names the Python line that it happened in
    faulthandler.dump_traceback_later(0.9 * timeout, file=log)
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    function, arguments = pickle.loads(call)
    if process_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    result = function(rank, *arguments)
    Path(f"rank_{rank}.partial").write_bytes(pickle.dumps(result))
    Path(f"rank_{rank}.partial").replace(folder / f"rank_{rank}.pickle")
    if dist.is_initialized():
        dist.destroy_process_group()
