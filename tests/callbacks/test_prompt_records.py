"""PromptRecords: every sample once, whatever dies and is done again."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import PromptRecords, SamplesTable
from lightning_rlhf.callbacks.prompt_records import worst
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.errors import InputError
from lightning_rlhf.experience import Safety
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.reporting.prompt_records import (
    COLUMNS,
    DamagedPieces,
    compact,
    next_start,
    piece_path,
    pieces,
    read_records,
    write_piece,
)
from tests.support import Recorder, fit, tiny_module


class Tables(DummyLogger):
    """A logger that keeps tables by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, int, list[dict[str, Any]]]] = []

    def log_table(self, rows: list[dict[str, Any]], iteration: int, name: str) -> None:
        self.tables.append((name, iteration, rows))


def test_every_sample_is_a_row_with_what_the_experience_says(tmp_path: Path) -> None:
    recorder, log = Recorder(), Tables()
    callbacks = [PromptRecords(every_n_iterations=2, rows=3), SamplesTable(), recorder]
    fit(tiny_module(iterations=3), callbacks, folder=tmp_path, logger=[log, DummyLogger()])
    rows = list(read_records(tmp_path))
    seen = [experience for experience, _ in recorder.of("on_experience_ready")]
    assert len(rows) == sum(map(len, seen)) and set(rows[0]) == set(COLUMNS)
    names = [path.name for path in sorted((tmp_path / "prompts" / "start_1").iterdir())]
    assert names == ["iterations_000001-000002.rank_0.parquet", "iterations_000003-000003.rank_0.parquet"]
    last, experience = [row for row in rows if row["iteration"] == 3], seen[2]
    assert [row["key"] for row in last] == experience.prompt_key
    assert [row["prompt"] for row in last] == experience.prompts
    assert [row["response"] for row in last] == experience.texts
    assert [row["score"] for row in last] == experience.scores.tolist()
    assert [row["terms"] for row in last] == [{"score": score} for score in experience.scores.tolist()]
    assert [row["seed"] for row in last] == experience.seed.tolist()
    assert [row["staleness"] for row in last] == [0] * len(last)
    assert last[0]["origin"].startswith("ArithmeticTask[train]:") and last[0]["finish"] in ("natural", "truncated")
    mask = experience.response_mask
    kl = (kl_estimate(experience.old_logprobs, experience.ref_logprobs, "k3") * mask).sum(-1) / mask.sum(-1)
    assert [row["kl_ref"] for row in last] == pytest.approx(kl.tolist()) and max(row["kl_ref"] for row in last) > 0
    advantages = (experience.advantages * mask).sum(-1) / mask.sum(-1)
    assert [row["advantage"] for row in last] == pytest.approx(advantages.tolist())
    [(name, iteration, table)] = log.tables
    assert (name, iteration) == ("worst_samples", 2)
    lowest = sorted(row["score"] for row in rows if row["iteration"] <= 2)[:3]
    assert [row["score"] for row in table] == lowest and "terms" not in table[0]


def test_iterations_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    checkpoint = IterationCheckpoint(str(tmp_path), every_n_iterations=2, keep=None)
    fit(
        tiny_module(iterations=4),
        [RNGState(), checkpoint, PromptRecords(3)],
        folder=tmp_path,
        enable_checkpointing=True,
    )
    before = list(read_records(tmp_path))
    fit(
        tiny_module(iterations=4),
        [RNGState(), PromptRecords(3)],
        folder=tmp_path,
        resume=tmp_path / "iteration_000002.ckpt",
    )
    after = list(read_records(tmp_path))
    assert {piece.start for piece in pieces(tmp_path)} == {1, 2}
    assert after == before, "the same numbers, as the resume is bit for bit, and none of them twice"


def row(iteration: int, score: float = 0.0, key: str = "a", safety: str | None = None) -> dict[str, list[Any]]:
    values = {"iteration": iteration, "key": key, "score": score, "prompt": "1+1=", "response": "2", "terms": []}
    values["safety"] = safety
    return {name: [values.get(name)] for name in COLUMNS}


def write(folder: Path, start: int, iteration: int, rank: int = 0, **values: Any) -> None:
    write_piece(piece_path(folder, start, iteration, iteration, rank), row(iteration, **values))


def read(folder: Path, **options: Any) -> list[tuple[int, float]]:
    return [(found["iteration"], found["score"]) for found in read_records(folder, **options)]


def test_a_later_start_voids_what_it_did_again_and_what_came_after(tmp_path: Path) -> None:
    """Start 1 reached 5 and is joined; start 2 went on after 2 and reached 3; start 3 has recorded nothing yet."""
    for iteration in range(1, 6):
        write(tmp_path, 1, iteration, score=1.0)
    compact(tmp_path, 1, 0, 5)
    write(tmp_path, 2, 3, score=2.0)
    (tmp_path / "prompts" / "start_3").mkdir()
    assert read(tmp_path) == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert next_start(tmp_path) == 4


def test_a_process_that_dies_while_it_joins_pieces_leaves_every_row_once(tmp_path: Path, monkeypatch: Any) -> None:
    for iteration in range(1, 5):
        write(tmp_path, 1, iteration, score=float(iteration))
        write(tmp_path, 1, iteration, rank=1, score=-float(iteration))
    expected = Counter(read(tmp_path))

    def killed(path: Path, **options: Any) -> None:
        if path.suffix == ".parquet":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            compact(tmp_path, 1, 0, 4)
    assert len(list(tmp_path.rglob("*.parquet"))) == 9 and Counter(read(tmp_path)) == expected
    compact(tmp_path, 1, 1, 4)
    assert Counter(read(tmp_path)) == expected
    assert read(tmp_path, rank=1, since=3) == [(3, -3.0), (4, -4.0)]


def test_a_piece_that_is_being_written_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    (tmp_path / "prompts" / "start_1" / ".iterations_000002-000002.rank_0.parquet.1.partial").write_bytes(b"PAR1")
    assert read(tmp_path) == [(1, 0.0)]


def damage(path: Path, how: str = "cut") -> None:
    """Cut a piece in the middle, write a table with other columns, or texts that are none."""
    import pyarrow
    import pyarrow.parquet

    if how == "cut":
        path.write_bytes(path.read_bytes()[:100])
        return
    table = pyarrow.parquet.ParquetFile(path).read()
    if how == "without a column":
        table = table.drop_columns("score")
    else:
        place = table.column_names.index("response")
        broken = pyarrow.array([b"\xff"] * len(table), pyarrow.binary()).view("string")
        table = table.set_column(place, "response", broken)
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize("how", ["cut", "without a column", "no text"])
def test_a_damaged_piece_is_named_once_and_left_out(tmp_path: Path, how: str) -> None:
    for iteration in (1, 2):
        write(tmp_path, 1, iteration)
    damage(piece_path(tmp_path, 1, 1, 1, 0), how)
    named = r"iterations_000001-000001\.rank_0\.parquet cannot be read as Parquet"
    with pytest.raises(InputError, match=named):
        read(tmp_path)
    told: list[str] = []
    damaged = DamagedPieces(told.append)
    for _ in range(2):
        assert read(tmp_path, damaged=damaged) == [(2, 0.0)]
        damaged.refuse_if_all()
    assert len(told) == 1 and re.search(named, told[0]) and told[0].endswith("its samples are left out")
    damage(piece_path(tmp_path, 1, 2, 2, 0), how)
    nothing = DamagedPieces(told.append)
    assert read(tmp_path, damaged=nothing) == []
    with pytest.raises(InputError, match=named):
        nothing.refuse_if_all()


def test_pieces_are_joined_around_a_damaged_one(tmp_path: Path) -> None:
    """It stays, and is told of again by the next reader: joined over, it would count as read."""
    for iteration in range(1, 6):
        write(tmp_path, 1, iteration)
    damage(piece_path(tmp_path, 1, 3, 3, 0))
    with pytest.raises(InputError):
        compact(tmp_path, 1, 0, 5)
    told: list[str] = []
    compact(tmp_path, 1, 0, 5, DamagedPieces(told.append))
    assert len(told) == 1 and [(piece.first, piece.last) for piece in pieces(tmp_path)] == [(1, 2), (3, 3), (4, 5)]
    assert [iteration for iteration, _ in read(tmp_path, damaged=DamagedPieces(told.append))] == [1, 2, 4, 5]
    assert len(told) == 2


def test_training_goes_on_beside_a_damaged_piece_of_an_earlier_start(tmp_path: Path) -> None:
    """Resumed after iteration 2 of 3: the table of iteration 3 is of iterations 1 to 3, the first two are damaged."""
    checkpoint, log = IterationCheckpoint(str(tmp_path), every_n_iterations=2, keep=None), Tables()
    fit(tiny_module(iterations=3), [checkpoint, PromptRecords(2)], folder=tmp_path, enable_checkpointing=True)
    path = piece_path(tmp_path, 1, 1, 2, 0)
    damage(path)
    again, resume = tiny_module(iterations=3), tmp_path / "iteration_000002.ckpt"
    with pytest.warns(UserWarning, match=re.escape(f"{path} cannot be read as Parquet")):
        fit(again, [RNGState(), PromptRecords(3)], folder=tmp_path, resume=resume, logger=log)
    assert again.control.iteration == 3 and path.stat().st_size == 100, "nothing is deleted"
    [(_, _, table)] = log.tables
    assert {row["iteration"] for row in table} == {3}


def test_a_piece_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """It has no column ``safety``, so what the filter did is not known; a resumed run has both kinds."""
    import pyarrow.parquet

    for iteration in (1, 2):
        write(tmp_path, 1, iteration, safety="")
    path = piece_path(tmp_path, 1, 1, 1, 0)
    pyarrow.parquet.write_table(pyarrow.parquet.ParquetFile(path).read().drop_columns("safety"), path)
    for columns in (None, ["safety"]):
        assert [found["safety"] for found in read_records(tmp_path, columns=columns)] == [None, ""]
    compact(tmp_path, 1, 0, 2)
    assert [found["safety"] for found in read_records(tmp_path)] == [None, ""]


WORDS = {Safety.UNSAFE: "unsafe", Safety.REPLACED: "replaced", Safety.CACHED: "cached"}


@pytest.mark.parametrize(
    "block",
    [
        {"action": "replace", "reply": "0"},
        {"action": "replace", "reply": "0", "cache": 16, "cache_similarity": 0.01},
        {"action": "replace", "reply": "0", "train_replaced": True},
        {"action": "discard_resample", "attempts": 1},
        {"action": "penalise"},
        None,
    ],
)
def test_what_the_safety_filter_replaced_or_left_out_is_marked(tmp_path: Path, block: dict[str, Any] | None) -> None:
    recorder = Recorder()
    safety = None if block is None else {"patterns": ["[13579]"]} | block
    module = tiny_module(iterations=3, safety=safety, termination={"min_tokens": 0})
    fit(module, [PromptRecords(), recorder], folder=tmp_path)
    expected: list[str] = []
    for experience, _ in recorder.of("on_experience_ready"):
        codes = [] if experience.safety is None else experience.safety.tolist()
        expected += [WORDS.get(Safety(code), "") for code in codes] or [""] * len(experience)
    if block is not None and block["action"] == "penalise":
        assert "unsafe" in expected
        expected = [""] * len(expected)
    elif block is not None:
        assert len(set(expected)) == (3 if "cache" in block else 2)
    found = list(read_records(tmp_path))
    assert [row["safety"] for row in found] == expected
    if block is not None and block["action"] == "discard_resample":
        assert {row["advantage"] for row in found if row["safety"]} == {None}, "not in the loss"


def test_prompts_are_chosen_by_key(tmp_path: Path) -> None:
    for iteration, key in enumerate("abab", start=1):
        write(tmp_path, 1, iteration, key=key)
    assert [found["iteration"] for found in read_records(tmp_path, keys=["b"])] == [2, 4]
    assert set(next(read_records(tmp_path, columns=["score"]))) == {"score", "iteration", "key"}


def test_the_worst_come_first_and_of_equal_ones_the_earliest() -> None:
    rows = [{"score": score, "n": n} for n, score in enumerate([1.0, -1.0, 0.0, -1.0])]
    assert [found["n"] for found in worst(rows, 3)] == [1, 3, 2]


def test_a_number_that_was_not_measured_is_null(tmp_path: Path) -> None:
    """Without a reference there is no KL."""
    from tests.support import tiny_policy

    module = tiny_module(policy=tiny_policy(reference="none"), kl={"coefficient": 0.0}, iterations=1)
    fit(module, [PromptRecords()], folder=tmp_path)
    found = list(read_records(tmp_path))
    assert {row["kl_ref"] for row in found} == {None} and all(math.isfinite(row["advantage"]) for row in found)
