"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf.files import ensure_line_end, replaced, write_whole

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


def test_appended_text_starts_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    ensure_line_end(path)  # none yet
    assert not path.exists()
    for before, after in (("", ""), ("a\n", "a\n"), ("a\nhal", "a\nhal\n")):
        path.write_text(before)
        ensure_line_end(path)
        assert path.read_text() == after
