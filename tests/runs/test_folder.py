"""A folder belongs to one run, and one command at a time writes in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_rlhf.runs import folder
from lightning_rlhf.runs.folder import claim, locked, note_start, quoted, refuse_a_second_run, starts, trained_here
from lightning_rlhf.schema import InputError


def test_eight_processes_that_claim_one_name_get_eight_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(claim, [tmp_path / "outputs" / "12-00-00"] * 8))
    assert sorted(path.name for path in found) == ["12-00-00", *(f"12-00-00-{i}" for i in range(2, 9))]
    assert all(path.is_dir() for path in found)


HOLD = """
import os, sys, time
from lightning_rlhf.runs.folder import locked
with locked(sys.argv[1]):
    child = os.fork()  # a worker that outlives its parent does not keep the lock
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(InputError, match=rf"another run is at work .*process {holder.pid} on "), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            assert os.path.exists(f"/proc/{worker}")
            with pytest.raises(InputError, match="a run of this process"), locked(tmp_path):
                pass
        with locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.stdout.close()


TRAIN = """
import sys, time
from lightning_rlhf.runs.folder import trained_here
with trained_here(sys.argv[1], first=True):
    print("there", flush=True)
    time.sleep(600)
"""


def test_a_folder_stays_locked_while_a_process_of_a_killed_command_trains_in_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 12 on a\n", encoding="utf-8")
    trainer = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == "there\n"
        said = rf"another run is at work .*\(process 12 on a, its first process {trainer.pid}\)"
        for _ in range(2):  # the refused start has left the lock as it was
            with pytest.raises(InputError, match=said), locked(tmp_path):
                pass
        with trained_here(tmp_path, first=False):
            pass
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_command_and_its_first_process_lock_a_folder_together(tmp_path: Path) -> None:
    with locked(tmp_path):
        trainer = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and trainer.stdout.readline() == "there\n"
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_a_new_run_does_not_write_over_another(tmp_path: Path) -> None:
    refuse_a_second_run(tmp_path, tmp_path / "elsewhere", None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "iteration_000003.ckpt").touch()
    with pytest.raises(InputError, match=r"iteration_000003\.ckpt\)\. resume=.*hydra\.run\.dir=FOLDER"):
        refuse_a_second_run(tmp_path, tmp_path / "elsewhere")


def test_starts_are_kept_and_the_first_configuration_stays(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    note_start(tmp_path, {"overrides": ["seed=1"]})
    note_start(tmp_path, {"overrides": ["seed=2"]}, {"seed": 2})
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"start": 3, "ov')  # killed meanwhile
    assert [(r["start"], r["overrides"]) for r in starts(tmp_path)] == [(1, ["seed=1"]), (2, ["seed=2"])]
    note_start(tmp_path, {"overrides": ["seed=3"]}, {"seed": 3})  # stands on a line of its own
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('[1]\n"typed"\n7\nnull\n')  # no starts
    assert [(r["start"], r["overrides"]) for r in starts(tmp_path)][1:] == [(2, ["seed=2"]), (3, ["seed=3"])]
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "seed: 1\n"
    assert (tmp_path / ".hydra" / "start_2" / "config.yaml").read_text() == "seed: 2\n"


@pytest.mark.parametrize("text", ["/a b/c=d", "/it's", "a\\b", "/a,b/{c}"])
def test_any_folder_can_be_an_override(text: str) -> None:
    from lightning_rlhf.runs.recompose import value_of

    assert value_of([f"hydra.run.dir={quoted(text)}"], "hydra.run.dir") == text


def test_a_folder_claimed_for_a_refused_start_is_removed_and_no_other(tmp_path: Path) -> None:
    names = ("refused", "sweep", "started", "explained", "before")
    made = {name: claim(tmp_path / name) for name in names}
    for path in made.values():
        (path / ".hydra").mkdir()
        (path / ".hydra" / "config.yaml").touch()
        (path / "train.log").touch()
    (made["sweep"] / "multirun.yaml").touch()
    (made["started"] / "starts.jsonl").touch()
    (made["explained"] / "train.log").write_text("a reason\n", encoding="utf-8")
    folder.claimed.update(made[name] for name in names[:-1])
    folder.remove_unused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "explained", "started"]
    assert not folder.claimed & set(made.values())
