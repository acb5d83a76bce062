"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlhf.distributed.launch import hand_over
from lightning_rlhf.errors import InputError
from lightning_rlhf.files import ensure_line_end, replaced, write_whole
from lightning_rlhf.interruption import REQUEST, passed_on
from lightning_rlhf.prompts.command import read_suspects
from lightning_rlhf.reporting import terminal
from lightning_rlhf.reporting.loggers import RunCSVLogger
from lightning_rlhf.reporting.prompt_records import FOLDER, SUSPECTS
from lightning_rlhf.reporting.spool import Spool
from lightning_rlhf.reporting.terminal import run_log
from lightning_rlhf.runs.folder import STARTS, starts
from lightning_rlhf.runs.resume import composition_of

KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_rlhf.files import replaced
with replaced(Path(sys.argv[1])) as file:
    file.write("half of the new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.json"
    write_whole(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL and path.read_text() == "old"


def test_an_error_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "old")
    with pytest.raises(ZeroDivisionError), replaced(path) as file:
        file.write("new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run.json"]
    write_whole(path, "grün\r\n")
    assert path.read_bytes() == "grün\r\n".encode()


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    """Whoever reads or writes there; it stays as it was, with nothing beside it."""
    config = {"output_dir": str(tmp_path)}
    uses: dict[str, Callable[[Path], object]] = {
        "any.json": lambda path: write_whole(path, "new"),
        "lines.jsonl": ensure_line_end,
        STARTS: lambda path: starts(path.parent),
        terminal.FILE: lambda path: run_log(str(path.parent), first=True).__enter__(),
        "launch.json": lambda path: hand_over(config),
        REQUEST: lambda path: passed_on(path.parent).__enter__(),
        "spool.jsonl": Spool,
        "metrics.csv": lambda path: RunCSVLogger(path.parent, name=""),
        "decisions.jsonl": lambda path: RunCSVLogger(path.parent, name=""),
        f"{FOLDER}/{SUSPECTS}": lambda path: read_suspects(tmp_path),
        ".hydra/overrides.yaml": lambda path: composition_of(tmp_path, 1),
    }
    for name, use in uses.items():
        path = tmp_path / name
        path.mkdir(parents=True)
        with pytest.raises(InputError, match=rf"{re.escape(str(path))} is a folder; allowed is a file") as caught:
            use(path)
        assert isinstance(caught.value, OSError), "for code that goes on without the file"
        assert path.is_dir() and os.listdir(path.parent) == [path.name], name
        shutil.rmtree(tmp_path / Path(name).parts[0])


def test_appended_text_starts_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    ensure_line_end(path)  # none yet
    assert not path.exists()
    for before, after in (("", ""), ("a\n", "a\n"), ("a\nhal", "a\nhal\n")):
        path.write_text(before)
        ensure_line_end(path)
        assert path.read_text() == after
