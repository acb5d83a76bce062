"""Two ranks of which only one has certain batches, prompts, fields or errors. No rank waits in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.uneven_ranks import evaluated, evaluations, failing_evaluation, training
from tests.ranks import run_ranks
from tests.support import tiny_module

LIMIT = 200
"""Seconds for two ranks from start to end, on a busy machine; a rank gives up after 60."""
COUNTS = [(3, 1), (1, 1), (1, 4), (2, 2), (5, 2)]
"""Held-out prompts, and prompts of a batch."""


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_evaluations_with_unequal_batches_and_with_fewer_prompts_than_ranks(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(evaluations, strategy, COUNTS, folder=tmp_path, process_group=False, timeout=LIMIT)
    assert first == second
    from lightning import Trainer

    alone = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    module = tiny_module()
    for numbers, count in zip(first, [*COUNTS, (4, 1)], strict=True):
        assert numbers == pytest.approx(evaluated(alone, module, *count), abs=1e-6), count


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_an_error_of_one_rank_in_an_evaluation_is_raised_on_all(tmp_path: Path, strategy: str) -> None:
    said = run_ranks(failing_evaluation, strategy, folder=tmp_path, process_group=False, timeout=LIMIT)
    assert said[0] == said[1] and "ZeroDivisionError: no reward for 2+2=, for row 0 of the batch" in said[0]


def test_an_override_on_one_rank_alone_is_no_override_on_the_other(tmp_path: Path) -> None:
    first, second = run_ranks(training, "override", folder=tmp_path, process_group=False, timeout=LIMIT)
    assert first == second and 0 < first < 0.1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"RuntimeError: experience.reward_override is not the same on all ranks \(rank 0: missing, rank 1: "),
        ("term", r"RuntimeError: experience.components\['mine'\] is not the same on all ranks \(rank 0: missing, "),
        ("reward", "RewardError: reward term .*: ZeroDivisionError: no reward on rank 1, for row 0"),
    ],
)
def test_different_fields_are_the_same_error_on_all_ranks(tmp_path: Path, kind: str, message: str) -> None:
    import re

    said = run_ranks(training, kind, folder=tmp_path, process_group=False, timeout=LIMIT)
    assert all(re.match(message, text) for text in said), said
