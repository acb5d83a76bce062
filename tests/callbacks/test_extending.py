"""A callback of the user's own: the template, and the example of the documentation, in real runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks.template import StopWhenSolved
from tests.support import fit, resume_equals_whole, tiny_module

ROOT = Path(__file__).resolve().parents[2]


def solved(batch: Any) -> list[float]:
    return [1.0] * len(batch.responses)


def test_the_template_ends_a_run_that_is_solved() -> None:
    module = tiny_module(iterations=9, reward=solved)
    fit(module, [StopWhenSolved(score=0.99, patience=3)])
    assert module.control.iteration == 3
    assert module.control.training_stopped == "mean score over 0.99 in 3 iterations in a row"


def test_the_templates_state_survives_a_resume(tmp_path: Path) -> None:
    [callback] = resume_equals_whole(
        tmp_path, lambda: [StopWhenSolved(patience=9)], lambda: tiny_module(iterations=4, reward=solved)
    )
    assert callback.solved == 4


def test_the_template_refuses_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"callbacks.template.patience = 0 is not allowed: a whole number >= 1"):
        StopWhenSolved(patience=0)


@pytest.mark.parametrize("page", ["extending.md", "callbacks.md"])
def test_the_documented_example_runs_as_it_stands(page: str) -> None:
    """Every Python block of a page that defines a callback is executed, and its class used in a run."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "(RLHFCallback)" in code]
    assert blocks
    for code in blocks:
        names: dict[str, Any] = {"__name__": "my_parts"}
        exec(compile(code, page, "exec"), names)
        [kind] = [v for v in names.values() if isinstance(v, type) and v.__module__ == "my_parts"]
        module = tiny_module(iterations=4, reward=solved)
        fit(module, [kind()])
        assert module.control.decisions, f"{kind.__name__} decided nothing"
