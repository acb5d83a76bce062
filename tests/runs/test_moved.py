"""Paths of a run that is resumed from another working directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_rlhf.runs.moved import moved

LONG = "{% for m in messages %}{{ m['content'] }}{% endfor %}" * 100
"""A chat template's text; as a path it is too long for any file system."""


@pytest.mark.parametrize(
    ("block", "value", "there"),
    [
        ({"source": {"chat_template": "x.jinja"}}, "x.jinja", True),
        ({"policy": {"lora": {"adapter": "adapters/x"}}}, "adapters/x", True),
        ({"source": {"chat_template": LONG}}, LONG, False),
        ({"source": {"bos": "x.jinja"}}, "x.jinja", False),
    ],
    ids=["template", "adapter", "text of a template", "no path"],
)
def test_relative_paths_of_a_model_start_at_the_first_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: dict, value: str, there: bool
) -> None:
    first, run, now = tmp_path / "first", tmp_path / "first" / "run", tmp_path / "now"
    for folder in (run, now, first / "adapters" / "x"):
        folder.mkdir(parents=True)
    (first / "x.jinja").touch()
    (run / "starts.jsonl").write_text(json.dumps({"cwd": str(first)}) + "\n", encoding="utf-8")
    monkeypatch.chdir(now)
    config = moved({"model": block}, run, str(run), run)
    node = config["model"]
    while isinstance(node, dict):
        [node] = node.values()
    assert node == (str(first / value) if there else value)
