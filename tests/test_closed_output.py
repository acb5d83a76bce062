"""Commands end quietly when the reader of their output goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf.closed_output import READER_GONE, quiet_without_reader

COMMAND = "import sys; from lightning_rlhf.cli import main; sys.exit(main())"


def without_reader(code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code whose standard output is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    python = [sys.executable, "-c", code, *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            python, stdout=write, stderr=subprocess.PIPE, text=True, cwd=folder, env=buffered, check=False
        )
    finally:
        os.close(write)


@pytest.mark.parametrize("words", ["--help", "prompts --help", "train --cfg job"])
def test_commands_end_quietly(words: str, tmp_path: Path) -> None:
    done = without_reader(COMMAND, *words.split(), folder=tmp_path)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def test_a_list_of_many_lines_ends_quietly(tmp_path: Path) -> None:
    """The error comes from a ``print`` in the middle, and not from what is left at the end."""
    body = "quiet_without_reader(lambda: [print('x' * 99) for _ in range(9999)] and 0)"
    code = f"import sys; from lightning_rlhf.closed_output import quiet_without_reader; sys.exit({body}())"
    done = without_reader(code, folder=tmp_path)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def test_a_broken_connection_is_no_closed_output(tmp_path: Path) -> None:
    @quiet_without_reader
    def asks_a_server() -> int:
        raise BrokenPipeError("the server has gone")

    with (tmp_path / "out").open("w", encoding="utf-8") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError, match="the server has gone"):
            asks_a_server()
