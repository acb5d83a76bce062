"""Stored scores: which answers they belong to, several for one answer, and files that are at fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.data import JSONLSource, ParquetSource
from lightning_rlhf.experience import Finish, prompt_key
from lightning_rlhf.rewards import CompositeReward, RewardBatch, RewardError, StoredScores

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2", "score": 1.0},
    {"prompt": "1+1=", "response": "3", "score": 0.25},
    {"prompt": "1+1=", "response": " 3\n", "score": 0.75},
    {"prompt": [{"role": "user", "content": "2+2"}], "response": "4", "score": -2},
]


def batch(*pairs: tuple[str, str], keys: list[str] | None = None, plain: list[str] | None = None) -> RewardBatch:
    prompts, responses = [p for p, _ in pairs], [r for _, r in pairs]
    count = len(pairs)
    return RewardBatch(
        prompts, responses, [[1]] * count, [{}] * count, [Finish.NATURAL] * count, plain or [], keys or []
    )


def test_scores_are_those_of_prompt_and_response() -> None:
    """Several scores of one answer count by their mean; spaces around the answer do not count; else it has none."""
    scores = StoredScores(ROWS)(batch(("1+1=", "2"), ("1+1=", "3 "), ("1+1=", "4"), ("1+2=", "3")))
    assert scores[:2] == [1.0, 0.5] and all(map(math.isnan, scores[2:]))


def test_a_chat_prompt_is_found_by_its_messages_and_an_answer_without_its_special_tokens() -> None:
    key = prompt_key([{"role": "user", "content": "2+2"}])
    given = batch(("<user>2+2<assistant>", "<think>4"), keys=[key], plain=["4"])
    assert StoredScores(ROWS)(given) == [-2.0]
    assert StoredScores(ROWS)(batch(("2+2", "4"))) == [-2.0], "a text and one message of it are one prompt"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_both_kinds_with_columns_of_other_names(tmp_path: Path, kind: str) -> None:
    rows = [{"q": row["prompt"], "a": row["response"], "human": row["score"]} for row in ROWS[:3]]
    path = tmp_path / f"scores.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = {"jsonl": JSONLSource, "parquet": ParquetSource}[kind](path)
    scores = StoredScores(source, prompt_field="q", response_field="a", score_field="human")
    assert scores(batch(("1+1=", "2"), ("1+1=", "3"))) == [1.0, 0.5]


def test_every_row_at_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    wrong = [{"prompt": "1"}, {"prompt": 1, "response": "2", "score": 0}, {"prompt": "1", "response": 2, "score": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[0], *wrong]), encoding="utf-8")
    with pytest.raises(RewardError) as raised:
        StoredScores(JSONLSource(path))
    said = str(raised.value)
    assert said.startswith("3 rows cannot be used:")
    assert f"{path}:2: no column 'response', 'score' (columns of the row: prompt)" in said
    assert f"{path}:3: prompt = 1 is neither a text nor a list of messages" in said
    assert f"{path}:4: response = 2 is no text; score = 'x' is not a finite number" in said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "rows: there is none"),
        ("scores.jsonl", r"rows = 'scores\.jsonl' is not allowed: a source of rows"),
        (3, "rows = 3 is not allowed"),
        ([{"prompt": "1", "response": "2", "score": math.nan}], r"row 1: score = nan is not a finite number"),
        ([{"prompt": "1", "response": "2", "score": True}], r"row 1: score = True is not a finite number"),
    ],
)
def test_what_is_no_source_of_scores_is_refused(rows: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        StoredScores(rows)


def test_as_a_term_of_a_reward_an_answer_without_a_score_is_an_error() -> None:
    reward = CompositeReward({"people": {"reward": StoredScores(ROWS)}})
    assert reward(batch(("1+1=", "2"))).total.tolist() == [1.0]
    with pytest.raises(RewardError, match="reward term 'people': nan is not a finite number"):
        reward(batch(("1+1=", "5")))
