"""The column that names groups: text from scalars, names for metrics, and rows that are refused with their place."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.data import DataError, PromptDataModule
from lightning_rlhf.data.groups import labels_of
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.errors import SettingError
from lightning_rlhf.kinds import scalar_text
from lightning_rlhf.metrics.names import check, valid
from tests.support import tiny_module

LEVELS = ["easy", "hard", "easy", "hard", "odd"]
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": level} for i, level in enumerate(LEVELS)]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data(train: Any = ROWS, validation: Any = None, **settings: Any) -> PromptDataModule:
    sizes = {"prompts_per_iteration": 2, "iterations": 1, "group_column": "level"} | settings
    return PromptDataModule(train, validation, tokenizer=tiny_module().tokenizer, **sizes)


def test_every_prompt_and_every_batch_knows_its_group() -> None:
    given = data(shuffle=False)
    given.setup("fit")
    assert [prompt.group for prompt in given.train_prompts] == LEVELS
    assert given.groups is not None and given.groups.train == ("easy", "hard", "odd")
    batch = given.train_batch(0)
    assert batch.groups == ["easy", "hard"]
    assert batch.repeat(2).groups == ["easy", "easy", "hard", "hard"]
    assert batch.first(1).groups == ["easy"] and batch.part(slice(1, 2)).groups == ["hard"]


def test_without_a_column_nothing_has_a_group() -> None:
    given = data(group_column=None)
    given.setup("fit")
    assert given.groups is None and given.train_batch(0).groups == []


def test_groups_survive_lists_and_the_held_out_split() -> None:
    given = data(validation_size=2)
    both = [*given.train_prompts, *given.validation_prompts]
    assert sorted((p.row["prompt"], p.group) for p in both) == [(r["prompt"], r["level"]) for r in ROWS]
    assert given.groups is not None and set(given.groups.labels) == set(LEVELS)
    assert set(given.groups.train) == {p.group for p in given.train_prompts}


@pytest.mark.parametrize("column", ["answer", "rambling", "prompt"])
def test_any_column_of_the_arithmetic_task_works(column: str) -> None:
    given = data(ArithmeticTask(max_value=4), group_column=column)
    assert {prompt.group for prompt in given.train_prompts} == {str(p.row[column]) for p in given.train_prompts}


@pytest.mark.parametrize(
    ("value", "text"),
    [("a b", "a b"), (3, "3"), (3.0, "3"), (0.5, "0.5"), (True, "true"), (False, "false"), (-2, "-2")],
)
def test_scalars_are_turned_to_text(value: Any, text: str) -> None:
    assert scalar_text(value) == text


@pytest.mark.parametrize("value", [None, math.nan, math.inf, [], ["a"], {"a": 1}, b"a"])
def test_other_values_are_no_text(value: Any) -> None:
    assert scalar_text(value) is None


BAD = [
    (None, "the value is null"),
    ("  ", "the value is an empty text"),
    (["hard"], "the value is ['hard']"),
    ({"name": "hard"}, "the value is {'name': 'hard'}"),
]


@pytest.mark.parametrize(("value", "said"), BAD)
def test_a_row_whose_value_is_no_scalar_is_refused_with_its_place(tmp_path: Path, value: Any, said: str) -> None:
    path = written(tmp_path, [*ROWS[:2], ROWS[2] | {"level": value}])
    with pytest.raises(DataError) as error:
        data(path).setup("fit")
    text = str(error.value)
    assert f"data.train: {path}:3: data.group_column = 'level': {said}" in text
    assert "allowed in this column: a text that is not empty, a number, true or false" in text


def test_a_row_with_nan_is_no_json_and_is_refused_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS[:2], ROWS[2] | {"level": math.nan}])
    with pytest.raises(DataError, match=f"data.train: {path}:3: NaN is not allowed in JSON"):
        data(path).setup("fit")


def test_rows_without_the_column_are_listed_and_counted(tmp_path: Path) -> None:
    rows = [ROWS[0], *({"prompt": f"1+{i}=", "answer": "1"} for i in range(12))]
    path = written(tmp_path, rows)
    with pytest.raises(DataError) as error:
        data(path).setup("fit")
    text = str(error.value)
    assert "12 rows cannot be used:" in text and "and 2 more" in text
    assert f"{path}:2: data.group_column = 'level': the row has no such column" in text


def test_a_column_in_no_row_is_refused_with_the_nearest_spelling() -> None:
    with pytest.raises(DataError, match=r"data.group_column = 'levle': no row has this column; did you mean 'level'\?"):
        data(group_column="levle").setup("fit")
    with pytest.raises(DataError, match=r"'zzz': no row has this column\. Columns: answer, level, prompt$"):
        data(group_column="zzz").setup("fit")


def test_a_column_of_ids_is_refused() -> None:
    rows = [row | {"id": f"id-{i:02}"} for i, row in enumerate(ROWS)]
    with pytest.raises(DataError) as error:
        data(rows, group_column="id", max_groups=4).setup("fit")
    text = str(error.value)
    assert text.startswith("data.group_column = 'id' has 5 different values (id-00, id-01, id-02, id-03, id-04)")
    assert "at most data.max_groups = 4" in text
    data(rows, group_column="id", max_groups=5).setup("fit")


@pytest.mark.parametrize("value", [0, 1.5, None, True])
def test_a_limit_that_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match=r"data\.max_groups = .* is not allowed: a whole number >= 1"):
        data(max_groups=value)


def test_held_out_rows_without_the_column_have_no_group_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    given = data(validation=[{"prompt": "9+9="}])
    with caplog.at_level(logging.WARNING):
        assert [prompt.group for prompt in given.validation_prompts] == [None]
    assert "data.validation: no row has data.group_column = 'level'; no eval/group/* is measured" in caplog.text
    with pytest.raises(DataError, match=r"data\.validation: .*the row has no such column"):
        data(validation=[{"prompt": "9+9="}, {"prompt": "8+8=", "level": "easy"}]).setup("fit")


# --- names in metrics ------------------------------------------------------------------------------------------------


def test_values_are_made_safe_for_metric_names() -> None:
    labels = labels_of(["easy", "GSM 8k", "a/b", "..", "x" * 100, "v1.5"])
    assert labels["easy"] == "easy" and labels["v1.5"] == "v1.5"
    assert labels["GSM 8k"] == "GSM_8k" and labels["a/b"] == "a_b" and labels[".."] == "__"
    assert labels["x" * 100] == "x" * 64
    names = [f"group/{label}/reward_mean" for label in labels.values()]
    check(names)
    assert all(valid(name) for name in names)


def test_values_that_would_share_a_name_are_told_apart_whatever_the_order() -> None:
    groups = ["a b", "a_b", "Math", "math", "数学", "编程", "x" * 64 + "1", "x" * 64 + "2", "free"]
    labels = labels_of(groups)
    assert len({label.lower() for label in labels.values()}) == len(groups)
    assert labels == labels_of(reversed(groups))
    assert labels["free"] == "free" and labels["a_b"].startswith("a_b-") and labels["数学"].startswith("__-")
    assert all(valid(f"group/{label}/kl_ref") for label in labels.values())
