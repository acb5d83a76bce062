"""SamplesTable: what the policy writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import SamplesTable
from lightning_rlhf.callbacks.samples_table import samples
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState, latest_valid
from tests.ranks import run_ranks
from tests.support import Recorder, fit, resume_equals_whole, tiny_module


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


# --- unsafe draws ------------------------------------------------------------------------------------------------

ODD = {"patterns": ["[13579]"], "attempts": 1}


class TableLog(DummyLogger):
    """A logger that keeps the named tables it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, str, list[dict[str, Any]]]] = []

    def log_table(self, rows: list[dict[str, Any]], iteration: int, name: str) -> None:
        self.tables.append((iteration, name, list(rows)))


def unsafe_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The files of unsafe draws by name."""
    files = sorted((folder / "samples").glob("unsafe_*.jsonl"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def test_unsafe_draws_reach_a_file_and_the_loggers_that_take_tables(tmp_path: Path) -> None:
    recorder, log = Recorder(), TableLog()
    table = SamplesTable(every_n_iterations=2, rows=4, unsafe_rows=5)
    fit(tiny_module(iterations=5, safety=ODD), [table, recorder], folder=tmp_path, logger=[log, DummyLogger()])
    files = unsafe_of(tmp_path)
    assert {name: [row["iteration"] for row in rows] for name, rows in files.items()} == {
        "unsafe_000001": [1] * 5,
        "unsafe_000002": [2] * 5,
        "unsafe_000004": [3] * 5 + [4] * 5,
        "unsafe_000005": [5] * 5,
    }, "the last one at the end of the training"
    assert [(f"unsafe_{iteration:06d}", name, rows) for iteration, name, rows in log.tables] == [
        (name, "unsafe_samples", rows) for name, rows in files.items()
    ]
    for (experience, stats), start in zip(recorder.of("on_experience_ready"), range(5), strict=True):
        every = [
            {"iteration": stats.iteration, "prompt_key": key, "prompt": prompt, **draw}
            for key, prompt, draws in zip(
                experience.prompt_key, experience.prompts, experience.unsafe_draws, strict=True
            )
            for draw in draws
        ]
        written = [row for rows in files.values() for row in rows if row["iteration"] == start + 1]
        assert len(every) > 5 and written[0] == every[0] and written[-1] == every[-1]
        assert [row for row in every if row in written] == written, "spread evenly, in their order"
    assert {"discarded", "left_out"} == {row["outcome"] for rows in files.values() for row in rows}
    columns = ["iteration", "prompt_key", "prompt", "response", "found_by", "found", "probability", "outcome"]
    assert list(files["unsafe_000001"][0]) == columns


def test_no_table_without_a_filter_without_a_find_or_where_none_is_asked_for(tmp_path: Path) -> None:
    nothing = {"patterns": ["no such text"]}
    for number, (safety, rows) in enumerate(((None, 8), (nothing, 8), (ODD, 0))):
        folder, table, log = tmp_path / str(number), SamplesTable(unsafe_rows=rows), TableLog()
        fit(tiny_module(iterations=2, safety=safety), [table], folder=folder, logger=log)
        assert [path.name for path in (folder / "samples").iterdir()] == ["iteration_000001.jsonl"]
        assert not log.tables and table.state_dict() == {}


def test_a_resumed_run_writes_the_unsafe_draws_from_before(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = []

    def callbacks() -> list[Any]:
        if (tmp_path / "samples").exists():
            tables.append(unsafe_of(tmp_path))
            for path in (tmp_path / "samples").iterdir():
                path.unlink()
        return [SamplesTable(every_n_iterations=4, unsafe_rows=2)]

    resume_equals_whole(tmp_path, callbacks, lambda: tiny_module(iterations=4, safety=ODD))
    [whole], resumed = tables, unsafe_of(tmp_path)
    assert [row["iteration"] for row in whole["unsafe_000004"]] == [2, 2, 3, 3, 4, 4]
    assert resumed == {"unsafe_000004": whole["unsafe_000004"]}


def test_rows_written_at_the_end_come_once_in_a_run_that_goes_on(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        table = SamplesTable(every_n_iterations=4, unsafe_rows=2)
        return [RNGState(), table, IterationCheckpoint(tmp_path / "checkpoints")]

    settings: dict[str, Any] = {"safety": {"patterns": ["."], "action": "penalise"}}
    fit(tiny_module(iterations=3, **settings), callbacks(), folder=tmp_path, enable_checkpointing=True)
    assert set(unsafe_of(tmp_path)) == {"unsafe_000001", "unsafe_000003"}
    newest = latest_valid(tmp_path / "checkpoints")
    fit(tiny_module(iterations=4, **settings), callbacks(), folder=tmp_path, enable_checkpointing=True, resume=newest)
    assert set(unsafe_of(tmp_path)) == {"unsafe_000001", "unsafe_000004"}
    assert [row["iteration"] for row in unsafe_of(tmp_path)["unsafe_000004"]] == [2, 2, 3, 3, 4, 4]


def two(rank: int) -> tuple[list[str], list[dict[str, Any]]]:
    table, recorder = SamplesTable(every_n_iterations=9, unsafe_rows=6), Recorder()
    fit(tiny_module(iterations=2, safety=ODD), [table, recorder], strategy="ddp", devices=2, folder=Path.cwd())
    keys = [key for experience, _ in recorder.of("on_experience_ready") for key in experience.prompt_key]
    return keys, table.state_dict()["unsafe"]


def test_the_unsafe_draws_of_all_ranks_are_in_the_table(tmp_path: Path) -> None:
    (first, rows), (second, others) = run_ranks(two, folder=tmp_path, process_group=False)
    files = unsafe_of(tmp_path)
    assert rows == others == files["unsafe_000002"] and len(rows) == len(files["unsafe_000001"]) == 6
    keys = {row["prompt_key"] for row in rows}
    assert keys & set(first) and keys & set(second) and not set(first) & set(second)


@pytest.mark.parametrize("setting", ["every_n_iterations", "rows"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.samples_table.{setting} = 0 is not allowed: a whole number >= 1"):
        SamplesTable(**{setting: 0})
    assert getattr(SamplesTable(**{setting: 1}), setting) == 1


def test_a_negative_number_of_unsafe_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"samples_table.unsafe_rows = -1 is not allowed: a whole number >= 0"):
        SamplesTable(unsafe_rows=-1)
