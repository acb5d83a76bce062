"""SamplesTable: what the policy writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_rlhf.callbacks import SamplesTable
from tests.support import fit, tiny_module


def test_samples_go_from_the_worst_to_the_best_and_to_every_logger_that_takes_them(tmp_path: Path) -> None:
    fit(tiny_module(iterations=3), [SamplesTable(every_n_iterations=2, rows=4)], folder=tmp_path)
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["iteration_000001.jsonl", "iteration_000002.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "samples" / files[0]).read_text().splitlines()]
    assert len(rows) == 4 and [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    assert rows[0]["prompt"].endswith("=") and rows[0]["finish"] in ("natural", "truncated")
    assert rows[0]["kl_ref"] == pytest.approx(0.0, abs=1e-4) and rows[0]["tokens"] >= 1
