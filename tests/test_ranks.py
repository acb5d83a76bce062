"""The helper that runs a function on several ranks: results, groups, and ranks that fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_rlhf.functional.stats import all_reduce_sum
from tests.ranks import run_ranks


def look(rank: int, scale: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "total": float(all_reduce_sum(torch.tensor(scale * (rank + 1)))),
        "threads": torch.get_num_threads(),
        "environment": (os.environ["RANK"], os.environ["MORE"]),
        "imported before": "tests.support" in sys.modules,
        "folder": Path.cwd(),
    }


def fails_alone(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.barrier()


def sleeps(rank: int) -> None:
    time.sleep(600)


def dies_alone(rank: int) -> str:
    assert not dist.is_initialized()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_each_rank_returns_its_result(tmp_path: Path) -> None:
    same = {"total": 6.0, "threads": 1, "imported before": True, "folder": tmp_path}
    expected = [{"rank": rank, "environment": (str(rank), "yes")} | same for rank in (0, 1)]
    assert run_ranks(look, 2.0, folder=tmp_path, environment={"MORE": "yes"}) == expected


def test_a_rank_that_fails_ends_the_others_and_its_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        run_ranks(fails_alone, folder=tmp_path)


def test_a_rank_may_be_expected_to_kill_itself(tmp_path: Path) -> None:
    assert run_ranks(dies_alone, folder=tmp_path, process_group=False, ends=[0, -signal.SIGKILL]) == ["alive", None]


def test_a_rank_that_never_ends_prints_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)Timeout.*test_ranks\.py.* in sleeps"):
        run_ranks(sleeps, folder=tmp_path, timeout=2)
