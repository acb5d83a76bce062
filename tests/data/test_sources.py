"""Sources: files, datasets and lists give rows with their place of origin; what cannot be read is said where."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from lightning_rlhf.data.sources import (
    SOURCE_KEY,
    DataError,
    HFDatasetSource,
    JSONLSource,
    ParquetSource,
    open_source,
    read_rows,
    resolve_path,
)
from lightning_rlhf.rewards import base as rewards_base

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]


def write_jsonl(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def without_source(rows):
    return [{key: value for key, value in row.items() if key != SOURCE_KEY} for row in rows]


def test_rewards_read_the_place_of_origin_under_the_same_key():
    assert rewards_base.SOURCE_KEY == SOURCE_KEY


def test_jsonl_gives_rows_with_file_and_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]), "", json.dumps(ROWS[1]))
    rows = list(JSONLSource(path))
    assert without_source(rows) == ROWS[:2]
    assert [row[SOURCE_KEY] for row in rows] == [f"{path}:1", f"{path}:3"]


def test_jsonl_keeps_unicode_line_separators_inside_strings_and_ignores_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n'.encode())
    assert without_source(JSONLSource(path)) == [{"prompt": "a\u2028b"}]


@pytest.mark.parametrize("source", [JSONLSource, ParquetSource])
def test_limit_takes_the_first_rows(tmp_path, source):
    if source is JSONLSource:
        path = write_jsonl(tmp_path / "a.jsonl", "", *map(json.dumps, ROWS))
    else:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert without_source(source(path, limit=2)) == ROWS[:2]


def test_limit_must_be_a_whole_number(tmp_path):
    for limit in (0, -1, 1.5, True):
        with pytest.raises(DataError, match=r"limit = .* is not allowed: a whole number >= 1"):
            JSONLSource(tmp_path / "a.jsonl", limit=limit)


def test_malformed_jsonl_line_is_named_with_file_line_and_text(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", json.dumps(ROWS[0]), '{"prompt": "1+1=", "answer" "2"}')
    with pytest.raises(DataError) as error:
        list(JSONLSource(path))
    message = str(error.value)
    assert message.startswith(f"{path}:2: not valid JSON (Expecting ':' delimiter at column 29)")
    assert '{"prompt": "1+1=", "answer" "2"}' in message


def test_jsonl_line_that_is_no_object_or_no_text_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", "[1, 2]")
    with pytest.raises(DataError, match=r"a\.jsonl:1: a line must hold one JSON object .* not \[1, 2\]"):
        list(JSONLSource(path))
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8 text"):
        list(JSONLSource(path))


@pytest.mark.parametrize("source", [JSONLSource, ParquetSource])
def test_missing_file_is_named(tmp_path, source):
    with pytest.raises(DataError, match=r"there is no file .*nowhere\.x"):
        list(source(tmp_path / "nowhere.x"))


def test_parquet_round_trip_with_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "answer": i} for i in range(3)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = list(ParquetSource(path))
    assert without_source(read) == rows
    assert read[2][SOURCE_KEY] == f"{path}:3"


def test_file_that_is_not_parquet_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.parquet", "hello")
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file"):
        list(ParquetSource(path))


def test_dataset_folder_round_trip(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "plain"))
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(str(tmp_path / "splits"))
    assert without_source(open_source(tmp_path / "plain")) == ROWS
    rows = list(HFDatasetSource(tmp_path / "splits", split="train", limit=3))
    assert without_source(rows) == ROWS[:3]
    assert rows[1][SOURCE_KEY] == f"{tmp_path / 'splits'}[train]:1"
    assert without_source(HFDatasetSource(tmp_path / "splits", split="test")) == ROWS[:1]


def test_dataset_errors_name_folder_and_splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match="has no split 'validation'; there are: train"):
        list(HFDatasetSource(tmp_path / "d", split="validation"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is not a folder written by Dataset\.save_to_disk"):
        list(HFDatasetSource(tmp_path / "empty"))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-rlhf\[data\]'"):
        list(HFDatasetSource(tmp_path / "d"))


def test_hub_dataset_is_asked_for_by_name_configuration_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(HFDatasetSource("someone/some-data", name="main", split="test", limit=1))
    assert asked == [(("someone/some-data", "main"), {"split": "test"})]
    assert rows == [{**ROWS[0], SOURCE_KEY: "someone/some-data[test]:0"}]


def test_open_source_takes_paths_lists_of_paths_rows_and_config_nodes(tmp_path, monkeypatch):
    one = write_jsonl(tmp_path / "one.jsonl", json.dumps(ROWS[0]))
    two = tmp_path / "two.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[1:]), two)
    assert without_source(open_source(str(one))) == ROWS[:1]
    assert without_source(open_source([str(one), two])) == ROWS
    assert without_source(open_source(OmegaConf.create([str(one), str(two)]))) == ROWS
    assert open_source(ROWS) is ROWS
    assert list(open_source(OmegaConf.create(ROWS))) == ROWS
    monkeypatch.chdir(tmp_path)
    assert without_source(open_source("one.jsonl")) == ROWS[:1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("data.csv", r"'data\.csv' is not a data file: allowed are \.jsonl, \.ndjson, \.parquet and folders"),
        ("no/such/thing", "nothing lies at .*no/such/thing.*HFDatasetSource"),
        (3, "3 is not a data source; allowed: a path"),
        ({"path": "x"}, "is not a data source"),
    ],
)
def test_what_is_no_source_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        open_source(value)


def test_rows_of_a_users_own_source_get_a_place():
    class Mine:
        def __iter__(self):
            yield from ROWS[:2]

    assert [row[SOURCE_KEY] for row in read_rows(Mine())] == ["Mine:0", "Mine:1"]
    assert next(iter(read_rows([{"prompt": "x", SOURCE_KEY: "there"}])))[SOURCE_KEY] == "there"
    with pytest.raises(DataError, match="list:0: a row must be a mapping of column names to values, not 'text'"):
        list(read_rows(["text"]))


def test_resolve_path_expands_home_and_variables_and_starts_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("DATA_ROOT", "/data")
    assert resolve_path("a/b.jsonl") == tmp_path / "a/b.jsonl"
    assert resolve_path("/abs/b.jsonl") == Path("/abs/b.jsonl")
    assert resolve_path("~/b.jsonl") == Path("/somebody/b.jsonl")
    assert resolve_path("$DATA_ROOT/b.jsonl") == Path("/data/b.jsonl")


def test_resolve_path_counts_from_where_a_hydra_job_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.data.sources.HydraConfig.initialized", lambda: True)
    monkeypatch.setattr("lightning_rlhf.data.sources.get_original_cwd", lambda: str(tmp_path))
    assert resolve_path("b.jsonl") == tmp_path / "b.jsonl"
