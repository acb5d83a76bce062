"""The queue on disk and its courier."""

from __future__ import annotations

import logging
import math
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.reporting import spool as module
from lightning_rlhf.reporting.spool import Courier, Spool


def numbers(spool: Spool) -> list[int]:
    return [record["n"] for record in spool.pending()]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "folder" / "spool.jsonl")
    for n in range(5):
        spool.append({"n": n})
    return spool


def test_first_in_first_out(spool: Spool) -> None:
    assert spool.pending(limit=2) == [{"n": 0}, {"n": 1}]
    spool.commit(2)
    spool.append({"n": 5})
    assert numbers(spool) == [2, 3, 4, 5] and not spool.empty


def test_nothing_is_left_on_disk_once_all_is_delivered(spool: Spool) -> None:
    spool.commit(3)
    assert spool.path.stat().st_size > 0
    spool.commit(2)
    assert spool.empty and spool.path.stat().st_size == 0
    spool.append({"n": 9})
    assert numbers(spool) == [9]


def test_records_outlive_the_object(spool: Spool) -> None:
    spool.commit(2)
    assert numbers(Spool(spool.path)) == [0, 1, 2, 3, 4]  # again, rather than never
    assert Spool(spool.path.with_name("absent")).empty


@pytest.mark.parametrize("rest", [b'{"n": 5', b'{"n": 5}', "ü".encode()[:1]])
def test_a_line_cut_by_a_crash_is_dropped(spool: Spool, rest: bytes) -> None:
    with spool.path.open("ab") as file:
        file.write(rest)
    again = Spool(spool.path)
    again.append({"n": 6})
    assert numbers(again) == [0, 1, 2, 3, 4, 6]


BROKEN = [b'{"n": 2{"n": 3}\n', b"\xff\xfe\n", b"[1, 2]\n", b"\n", b'{"m": 1}\n']


@pytest.mark.parametrize("line", BROKEN)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_broken_line_is_set_aside_and_all_else_is_delivered(
    spool: Spool, line: bytes, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    lines = spool.path.read_bytes().splitlines(keepends=True)
    spool.path.write_bytes(b"".join([*lines[: number - 1], line, *lines[number - 1 :]]))
    taken: list[int] = []

    def one_by_one(records: list[dict[str, Any]]) -> int:
        taken.append(records[0]["n"])
        return 1

    again = Spool(spool.path, lambda record: "n" in record)
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        assert Courier({again: one_by_one}, "somewhere", 1000.0).flush(30) and again.empty
    assert taken == [0, 1, 2, 3, 4] and spool.path.stat().st_size == 0
    assert again.broken.read_bytes() == line and again.broken.name == "spool.jsonl.broken"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{spool.path}: line {number} cannot be read: kept in {again.broken}")


def test_a_broken_line_is_kept_once_however_often_the_spool_is_opened(spool: Spool) -> None:
    with spool.path.open("ab") as file:
        file.write(b"no record\n")
    assert numbers(Spool(spool.path)) == numbers(Spool(spool.path)) == [0, 1, 2, 3, 4]
    assert Spool(spool.path).broken.read_bytes() == b"no record\n"


def test_a_broken_line_that_can_be_kept_nowhere_else_stays(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    with spool.path.open("ab") as file:
        file.write(b"no record\n")
    spool.broken.mkdir()  # cannot be written
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        spool.commit(len(spool.pending()))
        assert spool.empty and b"no record\n" in spool.path.read_bytes()
    assert len(caplog.records) == 1 and "kept in that file, as" in caplog.text and "line 6" in caplog.text
    spool.append({"n": 5})
    spool.broken.rmdir()
    assert numbers(spool) == [5]
    spool.commit(1)
    assert spool.path.stat().st_size == 0 and spool.broken.read_bytes() == b"no record\n"


def test_a_file_that_cannot_be_read_is_not_empty_and_a_flush_does_not_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool.jsonl")
    spool.path.mkdir()
    assert not Courier({spool: len}, "somewhere", 1000.0).flush(30) and not spool.empty
    assert "IsADirectoryError" in caplog.text


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[int | None], None]]:
    """Sets the size in bytes beyond which no file of this process can grow; ``None``: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


def test_what_a_full_disk_does_not_take_waits_in_memory_in_order(
    spool: Spool, full_disk: Callable[[int | None], None]
) -> None:
    content = spool.path.read_bytes()
    full_disk(len(content) + 4)  # half a record still fits
    spool.append({"n": 5})
    spool.append({"n": 6})
    kept, trouble, in_memory = spool.path.read_bytes(), spool.trouble, spool.in_memory
    spool.commit(4)
    limited = spool.pending(2), numbers(spool), spool.empty
    full_disk(None)
    assert kept == content, "no half line"
    assert in_memory == [{"n": 5}, {"n": 6}] and trouble is not None and "File too large" in trouble
    assert limited == ([{"n": 4}, {"n": 5}], [4, 5, 6], False)
    spool.append({"n": 7})
    assert numbers(spool) == [4, 5, 6, 7] and not spool.in_memory and spool.trouble is None
    assert numbers(Spool(spool.path)) == [0, 1, 2, 3, 4, 5, 6, 7], "all in the file"


def test_what_waits_in_memory_is_sent_from_there(
    tmp_path: Path, full_disk: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    spools = [Spool(tmp_path / "tracking" / name) for name in ("a.jsonl", "b.jsonl")]
    taken: list[int] = []

    def take(records: list[dict[str, Any]]) -> int:
        taken.append(records[0]["n"])
        return 1

    courier = Courier({spool: take for spool in spools}, "somewhere", 1000.0)
    full_disk(0)
    for n in range(4):
        spools[n % 2].append({"n": n})
        assert courier.flush(30)
    full_disk(None)
    assert taken == [0, 1, 2, 3] and not courier.in_memory
    for spool in spools:
        spool.append({"n": 4})
    assert courier.flush(30)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said  # once for both files, once that it is over
    assert said[0].startswith(f"{tmp_path / 'tracking'} cannot be written (OSError: [Errno 27] File too large")
    assert "can be written to disk again" in said[1]


def test_numbers_and_texts_survive(tmp_path: Path) -> None:
    record = {"text": "größer\nzwei Zeilen", "values": {"a": 0.1 + 0.2, "inf": math.inf, "nan": math.nan}}
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(record)
    (result,) = spool.pending()
    assert result["text"] == record["text"] and result["values"]["a"] == 0.1 + 0.2
    assert result["values"]["inf"] == math.inf and math.isnan(result["values"]["nan"])


def test_threads_do_not_mix_their_records(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.jsonl")

    def write(start: int) -> None:
        for n in range(start, start + 50):
            spool.append({"n": n, "filler": "x" * 1000})

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["n"] for record in spool.pending()) == list(range(150))


def test_the_courier_delivers_in_order_and_only_what_was_taken(spool: Spool) -> None:
    taken: list[int] = []

    def two_at_a_time(records: list[dict[str, Any]]) -> int:
        taken.extend(record["n"] for record in records[:2])
        return min(2, len(records))

    assert Courier({spool: two_at_a_time}, "somewhere", 0.01).flush(30)
    assert taken == [0, 1, 2, 3, 4]


def test_what_failed_is_tried_again_from_there(spool: Spool) -> None:
    taken: list[float] = []

    def fails_once(records: list[dict[str, Any]]) -> int:
        if records[0]["n"] == 3 and 3.5 not in taken:
            taken.append(3.5)
            raise OSError("away")
        taken.append(records[0]["n"])
        return 1

    courier = Courier({spool: fails_once}, "somewhere", 1000.0)
    assert not courier.flush(30)
    assert taken == [0, 1, 2, 3.5] and numbers(spool) == [3, 4]
    assert courier.flush(30)
    assert taken == [0, 1, 2, 3.5, 3, 4]


def test_waits_double_up_to_a_limit(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    done = threading.Event()

    class Condition(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            if threading.current_thread().daemon and timeout is not None:
                waits.append(timeout)
                if len(waits) < 7:
                    return True  # as if the time had passed
                done.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(module.threading, "Condition", Condition)

    def away(records: list[dict[str, Any]]) -> int:
        raise OSError("away")

    Courier({spool: away}, "somewhere", 2.0).wake()
    assert done.wait(30)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_spool_that_fails_does_not_hold_up_the_other(tmp_path: Path, failing: int) -> None:
    spools = [Spool(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for spool in spools:
        spool.append({"n": 0})

    def away(records: list[dict[str, Any]]) -> int:
        raise OSError("away")

    routes = {spool: away if index == failing else len for index, spool in enumerate(spools)}
    assert not Courier(routes, "somewhere", 1000.0).flush(30)
    assert [spool.empty for spool in spools] == [index != failing for index in (0, 1)]
