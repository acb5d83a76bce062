"""SamplesTable: what the policy writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import SamplesTable
from lightning_rlhf.callbacks.samples_table import samples
from tests.support import Recorder, fit, tiny_module


class SampleLog(DummyLogger):
    """A logger that keeps the tables it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, list[dict[str, Any]]]] = []

    def log_samples(self, rows: list[dict[str, Any]], iteration: int) -> None:
        self.tables.append((iteration, rows))


def test_samples_go_from_the_worst_to_the_best_and_to_every_logger_that_takes_them(tmp_path: Path) -> None:
    recorder, first, second = Recorder(), SampleLog(), SampleLog()
    callbacks = [SamplesTable(every_n_iterations=2, rows=4), recorder]
    fit(tiny_module(iterations=3), callbacks, folder=tmp_path, logger=[first, DummyLogger(), second])
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["iteration_000001.jsonl", "iteration_000002.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "samples" / files[0]).read_text().splitlines()]
    assert len(rows) == 4 and [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    assert rows[0]["prompt"].endswith("=") and rows[0]["finish"] in ("natural", "early", "truncated")
    assert rows[0]["kl_ref"] == pytest.approx(0.0, abs=1e-4) and rows[0]["tokens"] >= 1
    experience, _ = recorder.of("on_experience_ready")[0]
    scores = sorted(experience.scores.tolist())
    assert len(scores) == 16 and scores[0] < scores[-1]
    assert [row["score"] for row in rows] == [scores[i] for i in (0, 5, 10, 15)], "spread evenly over the ranks"
    texts = {(row["prompt"], row["response"], row["seed"]) for row in rows}
    assert texts <= set(zip(experience.prompts, experience.texts, experience.seed.tolist(), strict=True))
    assert [iteration for iteration, _ in first.tables] == [1, 2] and first.tables[0][1] == rows
    assert second.tables == first.tables


def test_all_samples_where_there_are_fewer_than_rows_and_one_where_one_is_asked_for(experience: Any) -> None:
    scores = sorted(experience.scores.tolist())
    assert [row["score"] for row in samples(experience, 100)] == scores
    assert [row["score"] for row in samples(experience, 1)] == scores[:1]
    apart = (experience.old_logprobs - experience.ref_logprobs).sum(-1)
    found = {(row["prompt_key"], row["seed"]): row for row in samples(experience, 100)}
    for i, (key, seed) in enumerate(zip(experience.prompt_key, experience.seed.tolist(), strict=True)):
        row = found[key, seed]
        assert row["tokens"] == int(experience.response_mask[i].sum())
        assert row["kl_ref"] == pytest.approx(float(apart[i]), abs=1e-6)
    experience.ref_logprobs = None
    assert {row["kl_ref"] for row in samples(experience, 100)} == {None}


@pytest.mark.parametrize("setting", ["every_n_iterations", "rows"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.samples_table.{setting} = 0 is not allowed: a whole number >= 1"):
        SamplesTable(**{setting: 0})
    assert getattr(SamplesTable(**{setting: 1}), setting) == 1
