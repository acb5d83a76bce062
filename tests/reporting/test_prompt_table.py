"""The table of a run's prompts, from hand-made records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.errors import InputError
from lightning_rlhf.reporting.prompt_records import COLUMNS, piece_path, write_piece
from lightning_rlhf.reporting.prompt_table import recorded_prompts


def write(folder: Path, iteration: int, rows: list[tuple[Any, ...]], rank: int = 0) -> None:
    """One piece; a row is key, score, KL, and what the safety filter did, if that is known."""
    columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in COLUMNS}
    columns |= {"iteration": [iteration] * len(rows), "key": [row[0] for row in rows]}
    columns |= {"prompt": [f"{row[0]} at {iteration}" for row in rows], "terms": [[]] * len(rows)}
    columns |= {"score": [row[1] for row in rows], "kl_ref": [row[2] for row in rows]}
    columns |= {"safety": [(*row, None)[3] for row in rows]}
    write_piece(piece_path(folder, 1, iteration, iteration, rank), columns)


def test_means_are_over_samples_and_the_excess_is_over_visits_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, 1, [("a", 1.0, 0.25), ("a", 3.0, 0.75), ("b", 0.0, 0.0)])
    write(tmp_path, 1, [("c", 5.0, 4.0)], rank=1)  # visits of iteration 1: a 0.5, b 0, c 4: the median is 0.5
    write(tmp_path, 2, [("b", 2.0, 3.0), ("a", 8.0, 2.0)])  # b 3, a 2: the median is 2.5
    a, b, c = recorded_prompts(tmp_path)
    assert (a.key, a.text, a.visits, a.samples, a.score, a.kl) == ("a", "a at 2", 2, 3, 4.0, 1.0)
    assert a.kl_excess == pytest.approx((0.0 - 0.5) / 2)
    assert (b.visits, b.samples, b.score, b.kl) == (2, 2, 1.0, 1.5)
    assert b.kl_excess == pytest.approx((-0.5 + 0.5) / 2)
    assert (c.kl, c.kl_excess) == (4.0, 3.5)


def test_a_prompt_that_was_drawn_late_has_no_excess_for_that(tmp_path: Path) -> None:
    """The policy moves away from the reference: every KL of the second iteration is larger."""
    write(tmp_path, 1, [("a", 0.0, 0.0), ("b", 0.0, 0.0), ("c", 0.0, 0.5)])
    write(tmp_path, 2, [("d", 0.0, 2.0), ("e", 0.0, 2.0), ("f", 0.0, 2.5)])
    assert [row.kl_excess for row in recorded_prompts(tmp_path)] == [0, 0, 0.5, 0, 0, 0.5]


def test_without_a_reference_there_is_no_kl(tmp_path: Path) -> None:
    write(tmp_path, 1, [("a", 1.0, None), ("b", 2.0, None)])
    assert [(row.score, row.kl, row.kl_excess) for row in recorded_prompts(tmp_path)] == [
        (1.0, None, None),
        (2.0, None, None),
    ]


def test_a_run_without_records_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no records of samples: the run needs callbacks=\[default,prompt_rec"):
        recorded_prompts(tmp_path)


def test_what_the_safety_filter_replaced_or_left_out_does_not_count(tmp_path: Path) -> None:
    """Visits of iteration 1: a 0.5, b 0, c 4 as above, and iteration 2 has a visit of b alone."""
    write(tmp_path, 1, [("a", 1.0, 0.5, ""), ("a", 9.0, 400.0, "replaced"), ("b", 0.0, 0.0), ("c", 5.0, 4.0)])
    write(tmp_path, 2, [("a", 9.0, 300.0, "unsafe"), ("b", 1.0, 1.0, ""), ("d", 9.0, 300.0, "cached")])
    a, b, c = recorded_prompts(tmp_path)
    assert (a.key, a.visits, a.samples, a.score, a.kl, a.kl_excess) == ("a", 1, 1, 1.0, 0.5, 0.0)
    assert (b.key, b.visits, b.kl, b.kl_excess) == ("b", 2, 0.5, pytest.approx((-0.5 + 0.0) / 2))
    assert (c.key, c.kl_excess) == ("c", 3.5)
