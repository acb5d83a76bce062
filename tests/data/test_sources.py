"""Sources: files, datasets and lists give rows with their place of origin; what cannot be read is said where."""

from __future__ import annotations

import gzip
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
    Sources,
    open_source,
    read_rows,
    resolve_path,
)
from lightning_rlhf.faults import Faults, excerpt
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1=", "answer" "2"}', "not valid JSON (Expecting ':' delimiter at column 29): "),
        ('{"prompt": "1+1="', "not valid JSON (Expecting ',' delimiter at column 18): "),
        ('   {"prompt": "\u00e4\u00f6" 1}', "not valid JSON (Expecting ',' delimiter at column 20): "),
        ('{"prompt": "' + "x" * 500 + '", answer: 1}', "not valid JSON (Expecting property name enclosed in double"),
        ('{"prompt": "1+1=", "answer": "2", "prompt": "2+2="}', "the key 'prompt' twice in one object, in "),
        ('{"prompt": [{"role": "user", "role": "system"}]}', "the key 'role' twice in one object, in "),
        ('{"prompt": "3+3=", "answer": NaN}', "NaN is not allowed in JSON: a number, or null where there is none, in "),
        ('{"prompt": "3+3=", "score": -Infinity}', "-Infinity is not allowed in JSON: "),
        ('{"prompt": "1"} {"prompt": "2"}', "not valid JSON (Extra data at column 17): "),
        ('{"prompt": "' + "[" * 5 + '", "a": ' + "[" * 100_000, "not valid JSON that can be read: it is nested too de"),
        ('{"prompt": "1", "answer": "\\ud83d"}', "no valid Unicode: '\\ud83d' is half of a surrogate pair, in "),
        ('["prompt"]', "a line must hold one JSON object such as {\"prompt\": ...}, not ['prompt']"),
        ('"prompt"', "a line must hold one JSON object such as"),
    ],
    ids=[
        "colon",
        "cut off",
        "behind spaces and umlauts",
        "far behind",
        "key twice",
        "key twice inside",
        "NaN",
        "infinity",
        "two",
        "deep",
        "surrogate",
        "array",
        "text",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", ""], ids=["LF", "CRLF", "none"])
def test_malformed_jsonl_line_is_named_with_file_line_column_and_text(tmp_path, line, message, end):
    path = tmp_path / "train.jsonl"
    path.write_bytes((json.dumps(ROWS[0]) + "\n" + line + end).encode())
    with pytest.raises(DataError) as error:
        list(JSONLSource(path))
    text = str(error.value)
    assert text.startswith(f"{path}:2: {message}")
    assert len(text) < len(str(path)) + 200


def test_the_text_around_a_mistake_far_behind_is_shown(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", '{"prompt": "' + "x" * 500 + '", answer: 1}')
    with pytest.raises(DataError, match=r"at column 516\): \.\.\.'x+\", answer: 1}'$"):
        list(JSONLSource(path))


def test_an_excerpt_begins_at_a_word_and_says_where_it_is_cut():
    text = '{"prompt": "How many apples are in seven baskets of twelve?", "answer": 84, "level" 3, "source": "a book"}'
    assert excerpt(text, text.index("3,")) == """...'of twelve?", "answer": 84, "level" 3, "source": "a book'..."""
    assert excerpt(text, 3) == """'{"prompt": "How many ap'..."""
    assert excerpt("x" * 100, 99) == f"...{'x' * 41!r}"


def test_every_line_at_fault_is_named_in_one_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", *['{"a"', '{"prompt": "1"}'] * 12, "17")
    other = tmp_path / "b.jsonl"
    other.write_bytes(gzip.compress(b"{}\n{}") + b"\n{}\n{}")
    read = []
    with pytest.raises(DataError) as error:
        read.extend(JSONLSource(path))
    assert read == [], "no row behind the first at fault"
    lines = str(error.value).splitlines()
    assert lines[0] == "13 rows cannot be used:" and lines[-1] == "  and 3 more" and len(lines) == 12
    assert [line.split(": ")[0] for line in lines[1:-1]] == [f"  {path}:{number}" for number in range(1, 20, 2)]
    with pytest.raises(DataError, match=r"^2 rows cannot be used:\n.*a\.jsonl:1: .*\n.*b\.jsonl:1: .* gzip archive"):
        list(Sources([JSONLSource(path, limit=2), JSONLSource(other)]))


def test_a_line_at_fault_counts_towards_the_limit(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", '{"prompt": "1"}', "{", '{"prompt": "2"}', "{")
    assert without_source(JSONLSource(path, limit=1)) == [{"prompt": "1"}]
    faults = Faults()
    assert len(list(JSONLSource(path, limit=3).read(faults))) == 2 and faults.count == 1


def test_a_subclass_that_changes_rows_is_read_through_its_own_iterator(tmp_path):
    class Upper(JSONLSource):
        def __iter__(self):
            return ({**row, "prompt": row["prompt"].upper()} for row in super().__iter__())

    path = write_jsonl(tmp_path / "a.jsonl", '{"prompt": "a"}')
    assert [row["prompt"] for row in read_rows(Upper(path), Faults())] == ["A"]


BYTES = {
    "invalid byte": (
        b'{"prompt": "ok"}\n{"prompt": "\xff"}\n',
        r":2: not UTF-8 text .invalid start byte at byte 13",
    ),
    "UTF-16": ('{"prompt": "ok"}'.encode("utf-16"), r":1: not UTF-8 text but UTF-16; save the file as UTF-8"),
    "gzip": (gzip.compress(b'{"prompt": "ok"}'), r":1: not text but a gzip archive; unpack it first"),
    "array on one line": (b'[{"prompt": "ok"}]', r":1: a line must .*looks like one JSON array.*jq -c '\.\[\]' old"),
    "array on many": (b'[\n {"prompt": "ok"}\n]', r":1: not valid JSON \(Expecting value.*looks like one JSON array"),
    "object on many": (b'{\n "prompt": "ok"\n}', r":1: not valid JSON .*looks like JSON over several lines.*jq -c \. "),
    "empty": (b"", " holds no row$"),
    "only blank lines": (b"\n \r\n", " holds no row$"),
    "only a byte order mark": (b"\xef\xbb\xbf", " holds no row$"),
}


@pytest.mark.parametrize(("content", "message"), BYTES.values(), ids=BYTES)
def test_files_that_are_no_jsonl_say_what_they_are(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jsonl{message}"):
        list(JSONLSource(path))


def test_pairs_of_surrogates_and_escaped_backslashes_are_fine(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", r'{"prompt": "\ud83d\ude00 \\ud83d"}')
    assert without_source(JSONLSource(path)) == [{"prompt": "\U0001f600 \\ud83d"}]


def test_a_folder_or_pattern_of_files_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (1, 0, 2):
        name = f"part-{number:05}.snappy.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[2 * number : 2 * number + 2]), folder / name)
    (folder / "_SUCCESS").write_text("")
    (folder / "._part-00000.parquet").write_text("left by a Mac")
    first, last = folder / "part-00000.snappy.parquet", folder / "part-00002.snappy.parquet"
    for path in (folder, folder / "*.parquet"):
        for source in (ParquetSource(path), open_source(str(path))):
            read = list(source)
            assert without_source(read) == ROWS
            assert [read[0][SOURCE_KEY], read[4][SOURCE_KEY]] == [f"{first}:1", f"{last}:1"]
    assert without_source(ParquetSource(folder, limit=3)) == ROWS[:3]


def test_folders_of_jsonl_and_folders_that_cannot_be_read(tmp_path):
    write_jsonl(tmp_path / "b.ndjson", json.dumps(ROWS[1]))
    write_jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    assert without_source(open_source(tmp_path)) == ROWS[:2]
    with pytest.raises(DataError, match=r"has no file that ends in \.parquet; it holds: a\.jsonl, b\.ndjson"):
        list(ParquetSource(tmp_path))
    (tmp_path / "c.parquet").write_text("")
    with pytest.raises(DataError, match=r"holds both JSONL and Parquet files; name one kind, as in \*\.parquet"):
        open_source(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no file that ends in \.jsonl or \.ndjson; it holds: nothing"):
        list(JSONLSource(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"empty' is not a data file: allowed are .* and folders of such files"):
        open_source(tmp_path / "empty")
    with pytest.raises(DataError, match=r"'a\.jsonl\.gz' is not a data file: .*; unpack it first"):
        open_source("a.jsonl.gz")


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
def test_invalid_sources_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        open_source(value)


def test_rows_of_a_users_own_source_get_a_place():
    class Mine:
        def __iter__(self):
            yield from ROWS[:2]

    assert [row[SOURCE_KEY] for row in read_rows(Mine(), Faults())] == ["Mine:0", "Mine:1"]
    assert next(iter(read_rows([{"prompt": "x", SOURCE_KEY: "there"}], Faults())))[SOURCE_KEY] == "there"
    with pytest.raises(DataError, match="list:0: a row must be a mapping of column names to values, not 'text'"):
        list(Sources([["text"]]))


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
