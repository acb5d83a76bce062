"""Prompts that leave no room for their responses are found before anything is generated, and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.data import DataError, check_room
from lightning_rlhf.data.prompts import Prompt
from tests.support import Recorder, fit, tiny_module


def data(train: list[int], validation: list[int] | None = None) -> Any:
    """Prompts of these lengths, one a line."""

    def prompts(name: str, lengths: list[int]) -> list[Prompt]:
        rows = enumerate(lengths, start=1)
        return [Prompt([5] * length, "x", f"{line}", {"_source": f"{name}.jsonl:{line}"}) for line, length in rows]

    return SimpleNamespace(train_prompts=prompts("t", train), validation_prompts=prompts("v", validation or []))


def test_what_fits_exactly_is_fine():
    check_room(data([64, 1], [64]), 64, 128, "the positions of the model")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            data([60, 152, 3], [60]),
            "data.train: 1 of 3 prompts and rollout.max_new_tokens = 64 need more than 128 tokens (the "
            "positions of the model): t.jsonl:2 (152 tokens). data.max_prompt_tokens=64 leaves such prompts out",
        ),
        (
            data([60], [65, 100]),
            "data.validation: 2 of 2 prompts and rollout.max_new_tokens = 64 need more than 128 tokens (the "
            "positions of the model): v.jsonl:1 (65 tokens), v.jsonl:2 (100 tokens). data.max_prompt_tokens=64 leaves "
            "such prompts out; rollout.max_new_tokens=28 makes room for them",
        ),
    ],
    ids=["training", "held out"],
)
def test_rows_that_do_not_fit_are_named_with_what_makes_room(prompts, message):
    with pytest.raises(DataError) as error:
        check_room(prompts, 64, 128, "the positions of the model")
    assert str(error.value) == message


def test_a_response_as_long_as_everything_leaves_no_room_for_any_prompt():
    with pytest.raises(
        DataError, match=r"rollout\.max_new_tokens = 128 is not allowed: no room .* in 128 tokens \(x\)"
    ):
        check_room(data([1]), 128, 128, "x")


def test_an_engines_limit_known_after_setup_is_checked_before_the_first_rollout(monkeypatch: pytest.MonkeyPatch):
    """As with vLLM servers, which report their longest sequence when the run connects to them."""
    module, recorder = tiny_module(iterations=1, max_new_tokens=6), Recorder()
    monkeypatch.setattr(type(module.engine), "positions", 10)
    with pytest.raises(DataError, match=r"data\.train: .* 10 tokens \(the longest sequence of the engine\): Arith"):
        fit(module, [recorder])
    assert not recorder.of("on_rollout_start")
    monkeypatch.setattr(type(module.engine), "positions", 12)
    fit(module, [recorder])
