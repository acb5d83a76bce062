"""Changing any key of the block ``module.ptx`` changes a real run; see tests/schema/test_keys.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_rlhf import schema
from tests.schema.test_keys import observe, overrides

RUN = {
    "text_field": "other",
    "length": "12",
    "tokens_per_step": "40",
    "coefficient": "0.5",
    "held_out": "2",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files, each with two columns of text."""
    paths = []
    for number in (1, 2):
        path = tmp_path_factory.mktemp("text") / "rows.jsonl"
        rows = [{"text": f"{a}+{number}={a + number} " * 9, "other": f"{a}*{a} = " * 9} for a in range(9)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)
    return paths


def ptx(path: Path) -> list[str]:
    return ["ptx=default", f"module.ptx.source={path}", "module.ptx.length=16", "module.ptx.tokens_per_step=20"]


def test_every_key_has_an_entry(compose, texts) -> None:
    block = schema.check(compose(*ptx(texts[0])))["module"]["ptx"]
    assert set(block) == set(RUN) | {"source"}
    assert schema.check(compose())["module"].get("ptx") is None


@pytest.mark.slow
@pytest.mark.parametrize("key", [*RUN, "source"])
def test_a_run_changes(compose, tmp_path_factory, texts, key) -> None:
    value = str(texts[1]) if key == "source" else RUN[key]
    before, after = overrides(f"module.ptx.{key}", {f"module.ptx.{key}": (value, ptx(texts[0]))})
    assert observe(compose, tmp_path_factory, before) != observe(compose, tmp_path_factory, after)
