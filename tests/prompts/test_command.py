"""The command ``lightning-rlhf prompts``: suspects, one prompt's history, lists and a page, and the next run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lightning_rlhf import cli
from lightning_rlhf.data.lists import read_list
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.reporting.prompt_records import COLUMNS, FOLDER, SUSPECTS, piece_path, write_piece
from lightning_rlhf.reporting.prompt_review import FILES, fault_of, key_list, shortened

NOISY, FAR, GOOD = (prompt_key(text) for text in ("1+1=", "<b>2+2=</b>", "3+3="))
TEXTS = {NOISY: "1+1=", FAR: "<b>2+2=</b>", GOOD: "3+3="}


def suspect(key: str, reasons: list[str], **z: float) -> dict[str, Any]:
    numbers = {"score": 0.25, "reward": -0.5, "spread": 9.75, "kl_excess": 0.125}
    return {"key": key, "reasons": reasons, "since": 7, "visits": 5, "samples": 10, **numbers, "z": z}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with two suspects and two iterations of records, as the current folder's ``outputs/day/time``."""
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/day/time")
    for iteration in (8, 9):
        rows = [(key, text, sample) for key, text in TEXTS.items() for sample in range(2)]
        columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in COLUMNS}
        columns |= {
            "iteration": [iteration] * len(rows),
            "key": [key for key, _, _ in rows],
            "prompt": [text for _, text, _ in rows],
            "response": [f"answer {sample}\n<script>alert(1)</script>" for _, _, sample in rows],
            "origin": [f"rows.jsonl:{n}" for n in range(len(rows))],
            "finish": ["natural"] * len(rows),
            "score": [float(iteration + sample) for _, _, sample in rows],
            "terms": [[]] * len(rows),
        }
        write_piece(piece_path(folder, 1, iteration, iteration, 0), columns)
    found = {
        **{"iteration": 9, "seen": 3, "judged": 3, "z": 3.0},
        "others": {"score": 1.0, "reward": 0.0, "spread": 0.5, "kl_excess": None},
        "suspects": [suspect(NOISY, ["reward", "spread"], reward=-4.0, spread=31.25), suspect(FAR, ["kl"], kl=5.0)],
    }
    (folder / FOLDER / SUSPECTS).write_text(json.dumps(found), encoding="utf-8")
    (folder / "starts.jsonl").touch()
    return folder


def test_suspects_are_listed_with_reasons_and_numbers(run: Path, capsys: pytest.CaptureFixture) -> None:
    for where in (str(run), "latest"):
        assert cli.main(["prompts", where]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{run}, iteration 9: 2 of 3 prompts stand out from the others (|z| > 3)"
        assert lines[2].split()[-5:] == ["spread", "kl_excess", "visits", "since", "prompt"]
        assert lines[3].split() == [
            NOISY,
            "reward",
            "-4.0,",
            "spread",
            "+31.2",
            "0.25",
            "9.75",
            "0.125",
            "5",
            "7",
            "1+1=",
        ]
        assert lines[4].startswith(FAR) and "kl +5.0" in lines[4] and lines[4].endswith("<b>2+2=</b>")
        assert lines[5].split() == ["median", "of", "all", "1", "0.5", "-"]


def test_latest_is_the_run_that_was_started_last(run: Path, capsys: pytest.CaptureFixture) -> None:
    other = Path("outputs/day/earlier")
    other.mkdir()
    (other / "starts.jsonl").touch()
    os.utime(other / "starts.jsonl", (1, 1))
    assert cli.main(["prompts", "latest"]) == 0
    assert capsys.readouterr().out.startswith(str(run))


def test_why_shows_one_prompts_history(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["prompts", str(run), "--why", NOISY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{NOISY} (rows.jsonl:1): stands out by reward -4.0, spread +31.2 since iteration 7"
    assert lines[1] == "1+1="
    assert lines[3].split()[-3:] == ["kl_ref", "advantage", "tokens"], "no column safety where nothing is marked"
    assert [line.split()[:5] for line in lines[4:6]] == [["8", "2", "8.5", "8", "9"], ["9", "2", "9.5", "9", "10"]]
    assert lines[-1] == "  iteration 9, score 10, natural: answer 1 <script>alert(1)</script>"
    assert cli.main(["prompts", str(run), f"--why={GOOD}"]) == 0
    assert capsys.readouterr().out.startswith(f"{GOOD} (rows.jsonl:5): not flagged")


def test_export_writes_a_page_records_and_lists_that_the_next_run_reads(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["prompts", str(run), "--export", "review"]) == 0
    assert "data.blacklist=review/blacklist.txt (1 keys)" in capsys.readouterr().out
    assert {path.name for path in Path("review").iterdir()} == set(FILES.values())
    assert read_list("review/blacklist.txt", "data.blacklist") == {NOISY: 1.0}
    assert read_list("review/conservative.txt", "data.conservative", factor=2.0) == {FAR: 2.0}
    assert f"{NOISY}  # reward -4.0, spread +31.2: 1+1=" in Path("review/blacklist.txt").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in Path("review/suspects.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["key"] for row in rows] == [NOISY, FAR]
    assert [record["score"] for record in rows[0]["records"]] == [8.0, 9.0, 9.0, 10.0]
    page = Path("review/index.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>" not in page and NOISY in page
    assert "http" not in page, "nothing is loaded from elsewhere"


def test_edited_lists_are_not_written_over(run: Path, capsys: pytest.CaptureFixture) -> None:
    Path("review").mkdir()
    Path("review/blacklist.txt").write_text("mine", encoding="utf-8")
    assert cli.main(["prompts", str(run), "--export", "review"]) == 2
    assert "review/blacklist.txt exists and may have been edited; take a new folder" in capsys.readouterr().err
    assert [path.name for path in Path("review").iterdir()] == ["blacklist.txt"]


def test_without_records_the_numbers_are_still_there(run: Path, capsys: pytest.CaptureFixture) -> None:
    for path in run.rglob("*.parquet"):
        path.unlink()
    assert cli.main(["prompts", str(run)]) == 0
    assert "(not recorded)" in capsys.readouterr().out
    assert cli.main(["prompts", str(run), "--export", "review"]) == 0
    assert "has no records, so texts and responses are missing" in capsys.readouterr().out
    assert cli.main(["prompts", str(run), "--why", NOISY]) == 2
    assert "the run needs callbacks=[default,prompt_records]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "prompts needs the folder of one run, or latest; given: none"),
        (["a", "b"], "given: a, b"),
        (["nowhere"], "'nowhere' does not exist; allowed: the output folder of a run, or latest"),
        (["."], "holds nothing about prompts: the run needs callbacks=[default,prompt_monitor,prompt_records]"),
        (
            ["outputs/day/time", "--wy", "a"],
            "--wy is no flag of prompts; there are --why KEY, --export FOLDER, --map FOLDER, --screen FILE, "
            "--threshold P, --embedding NAME",
        ),
        (["outputs/day/time", "--map"], "--map needs a value: a folder"),
        (["outputs/day/time", "--screen", "--export"], "--screen needs a value: a file of new prompts"),
        (["outputs/day/time", "--threshold", "0.5"], "--threshold has no effect without --screen FILE"),
        (["outputs/day/time", "--embedding=f.g"], "--embedding has no effect without --map FOLDER or --screen FILE"),
        (["outputs/day/time", "--screen", "f", "--threshold=1"], "--threshold 1 is not allowed: a number > 0 and < 1"),
        (["outputs/day/time", "--screen", "f", "--threshold", "x"], "--threshold x is not allowed: a number"),
        (["outputs/day/time", "--map", "m"], "outputs/day/time has no whole checkpoint, and the vectors of prompts"),
        (["outputs/day/time", "--why"], "--why needs a value: a prompt key"),
        (["outputs/day/time", "--export", "--why"], "--export needs a value: a folder"),
        (["outputs/day/time", "--why", "abc"], "'abc' is no prompt that outputs/day/time has recorded"),
    ],
)
def test_bad_arguments_are_refused(run: Path, capsys: pytest.CaptureFixture, arguments: list[str], said: str) -> None:
    assert cli.main(["prompts", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_monitor_or_with_a_damaged_file_is_told(run: Path, capsys: pytest.CaptureFixture) -> None:
    (run / FOLDER / SUSPECTS).write_text("{", encoding="utf-8")
    assert cli.main(["prompts", str(run)]) == 2
    assert "suspects.json cannot be read" in capsys.readouterr().err
    (run / FOLDER / SUSPECTS).unlink()
    assert cli.main(["prompts", str(run)]) == 2
    assert "the run has no callback prompt_monitor" in capsys.readouterr().err


SUSPECT = suspect(NOISY, ["spread"], spread=4.0)
WHOLE = {"iteration": 3, "judged": 9, "z": 3.0, "others": {}, "suspects": [SUSPECT]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"iteration": 3}, "'judged' is missing"),
        ([], "a list in place of an object"),
        ({"suspects": None}, "'iteration' is missing"),
        (WHOLE | {"suspects": None}, "'suspects' is null"),
        (WHOLE | {"z": "3"}, "'z' is a text"),
        (WHOLE | {"others": {"kl": "low"}}, "'others' holds something else than numbers"),
        (WHOLE | {"suspects": [3]}, "suspect 0: 3 in place of an object"),
        (
            WHOLE | {"suspects": [SUSPECT, SUSPECT | {"kl_excess": []}]},
            "suspect 1: one of score, reward, spread, kl_excess is no number",
        ),
        (WHOLE | {"suspects": [SUSPECT | {"z": {}}]}, "suspect 0: 'z' lacks a number of 'reasons'"),
    ],
)
def test_a_file_of_suspects_with_another_content_is_told(
    run: Path, capsys: pytest.CaptureFixture, content: Any, said: str
) -> None:
    (run / FOLDER / SUSPECTS).write_text(json.dumps(content), encoding="utf-8")
    for arguments in ([str(run)], [str(run), "--export", "new"], [str(run), "--why", NOISY]):
        assert cli.main(["prompts", *arguments]) == 2
        error = capsys.readouterr().err
        assert f"{FOLDER}/{SUSPECTS} is not as callbacks.prompt_monitor writes it: {said}" in error


def test_a_file_of_suspects_that_is_whole() -> None:
    assert fault_of(WHOLE) == "" and fault_of(WHOLE | {"suspects": [SUSPECT | {"score": None}]}) == ""


def test_a_prompt_of_several_lines_stays_a_comment() -> None:
    """Otherwise its second line would be read as a key."""
    text = key_list("run", [suspect(NOISY, ["spread"], spread=4.0)], {NOISY: [{"prompt": f"a\n{GOOD}\r\u2028b"}]})
    assert len(text.splitlines()) == 2 and shortened("a\n b\tc" * 9, 9) == "a b ca..."


def test_a_real_run_its_suspects_and_the_run_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tiny_run: list[str]
) -> None:
    """From training to the list and back: what the first run lists, the second does not draw."""
    monkeypatch.chdir(tmp_path)
    own = ["model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "logger=none"]
    own += ["model.lr.actor=5e-4"]  # with a smaller rate no prompt stands out
    own += ["data.train.max_value=3", "data.train.held_out=0.2", "data.validation=null", "rollout.max_new_tokens=3"]
    watch = ["callbacks=[prompt_monitor,prompt_records]", "callbacks.prompt_monitor.min_prompts=3"]
    watch += ["callbacks.prompt_monitor.min_visits=2", "callbacks.prompt_monitor.z=0.01", "iterations=8"]
    assert cli.main(["train", "hydra.run.dir=outputs/first", *tiny_run, *own, *watch]) == 0
    capsys.readouterr()
    assert cli.main(["prompts", "latest", "--export", "review"]) == 0
    listed = {
        **read_list("review/blacklist.txt", "data.blacklist"),
        **read_list("review/conservative.txt", "data.blacklist"),
    }
    assert listed
    Path("one.txt").write_text(next(iter(listed)), encoding="utf-8")
    second = ["hydra.run.dir=outputs/second", *tiny_run, *own, *watch, "data.blacklist=one.txt"]
    assert cli.main(["train", *second]) == 0
    assert "1 of" in capsys.readouterr().err + Path("outputs/second/train.log").read_text(encoding="utf-8")
    assert cli.main(["prompts", "outputs/second", "--why", next(iter(listed))]) == 2


def test_latest_is_the_newest_run_with_records(run: Path, capsys: pytest.CaptureFixture) -> None:
    refused = Path("outputs/day/refused")
    refused.mkdir()
    (refused / "starts.jsonl").touch()
    os.utime(run / "starts.jsonl", (1, 1))
    assert cli.main(["prompts", "latest"]) == 0
    assert capsys.readouterr().out.startswith(f"{run}, iteration 9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--export", "/proc/none"], "/proc/none"),
        (["--export", "file/x"], "file/x: Not a directory"),
        (["--map", "file/x", "--embedding", "builtins.len"], "file/x"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    run: Path, capsys: pytest.CaptureFixture, words: list[str], said: str
) -> None:
    Path("file").touch()
    words = [word.replace("builtins.len", f"{__name__}.vectors") for word in words]
    assert cli.main(["prompts", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def vectors(texts: list[str]) -> Any:
    return [[float(len(text)), 1.0] for text in texts]


def exits(texts: list[str]) -> Any:
    raise SystemExit(0)


def test_code_that_exits_is_no_success(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["prompts", str(run), "--map", "map", "--embedding", f"{__name__}.exits"]) == 1
    assert "has called exit(0)" in capsys.readouterr().err and not Path("map").exists()


def test_a_file_is_no_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["prompts", str(run / "starts.jsonl")]) == 2
    assert "is a file; allowed: the output folder of a run" in capsys.readouterr().err


def rewritten(run: Path, iteration: int, **columns: list[Any]) -> Path:
    """The piece of an iteration, with other columns."""
    path = piece_path(run, 1, iteration, iteration, 0)
    table = pyarrow.parquet.ParquetFile(path).read().to_pydict()
    write_piece(path, table | columns)
    return path


def test_responses_that_the_safety_filter_replaced_are_marked(run: Path, capsys: pytest.CaptureFixture) -> None:
    """Two samples of each of three prompts; of the first prompt the second sample of 8 and both of 9 do not count."""
    rewritten(run, 8, safety=["", "replaced", "", "", "", ""])
    rewritten(run, 9, safety=["unsafe", "replaced", "", "", "", ""])
    assert cli.main(["prompts", str(run), "--why", NOISY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[-1] == "safety"
    assert lines[4].split() == ["8", "1", "8", "8", "8", "-", "-", "-", "1", "replaced"]
    assert lines[5].split() == ["9", "0", *["-"] * 6, "1", "unsafe,", "1", "replaced"]
    assert lines[-1].startswith("  iteration 9, score 10, natural, replaced: answer 1")
    assert lines[-4].startswith("  iteration 8, score 8, natural: answer 0")
    assert cli.main(["prompts", str(run), "--export", "review"]) == 0
    page = Path("review/index.html").read_text(encoding="utf-8")
    assert page.count("<td>natural</td><td>replaced</td>") == 2 and page.count("<td>natural</td><td></td>") == 5
    rows = [json.loads(line) for line in Path("review/suspects.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["safety"] for record in rows[0]["records"]] == ["", "replaced", "unsafe", "replaced"]


@pytest.mark.parametrize(
    "words", [[], ["--why", NOISY], ["--export", "review"], ["--map", "map", "--export", "review"]], ids=" ".join
)
def test_a_damaged_piece_is_told_once_and_left_out(run: Path, capsys: pytest.CaptureFixture, words: list[str]) -> None:
    if "--map" in words:
        words = [*words, "--embedding", f"{__name__}.vectors"]
    paths = [piece_path(run, 1, iteration, iteration, 0) for iteration in (8, 9)]
    paths[0].write_bytes(paths[0].read_bytes()[:50])
    assert cli.main(["prompts", str(run), *words]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {paths[0]} cannot be read as Parquet")
    paths[1].write_bytes(paths[1].read_bytes()[:50])
    again = [word.replace("review", "another") for word in words]
    assert cli.main(["prompts", str(run), *again]) == 2
    assert f"\n{paths[0]} cannot be read as Parquet" in capsys.readouterr().err and not Path("another").exists()


def test_a_file_of_suspects_of_an_earlier_release(run: Path, capsys: pytest.CaptureFixture) -> None:
    """It has ``kl`` in place of ``kl_excess``."""
    path = run / FOLDER / SUSPECTS
    path.write_text(path.read_text(encoding="utf-8").replace('"kl_excess"', '"kl"'), encoding="utf-8")
    assert cli.main(["prompts", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[7] == "0.125"
