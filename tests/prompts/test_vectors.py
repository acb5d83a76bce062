"""Vectors of prompts: of the policy against transformers' own forward pass, and of callables of the user's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightning_rlhf.data.prompts import MESSAGES_KEY
from lightning_rlhf.data.sources import SOURCE_KEY
from lightning_rlhf.errors import InputError
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.models.actor import Actor
from lightning_rlhf.prompts.vectors import RunPolicy, batches, embedded, make_embedding
from tests.support import tiny_policy

TEXTS = ["7", "12+34=", "9*9", "1+1=", "123456789+12345="]


@pytest.fixture(scope="module")
def policy() -> RunPolicy:
    made = tiny_policy()
    return RunPolicy(Path("iteration_000001.ckpt"), {"data": {}}, made.tokenizer, made.actor)


def test_states_and_logprobs_are_those_of_each_prompt_alone(policy: RunPolicy) -> None:
    ids = [policy.tokenizer(text)["input_ids"] for text in TEXTS]
    found = policy.measure(ids)
    assert found.tokens.tolist() == [1, 6, 3, 4, 16] and found.states.shape == (5, 32)
    for row, own in enumerate(ids):
        with torch.no_grad():
            out = policy.actor.lm(torch.tensor([own]), output_hidden_states=True)
        torch.testing.assert_close(found.states[row], out.hidden_states[-1][0].mean(0), rtol=0, atol=1e-5)
        logprobs = out.logits[0, :-1].double().log_softmax(-1).gather(-1, torch.tensor(own)[1:, None])
        expected = float(logprobs.mean()) if len(own) > 1 else 0.0
        assert found.logprobs[row].item() == pytest.approx(expected, abs=1e-5)


def test_the_cut_into_batches_changes_nothing(policy: RunPolicy) -> None:
    ids = [policy.tokenizer(text)["input_ids"] for text in TEXTS]
    whole, single = policy.measure(ids), policy.measure(ids, tokens=1)
    torch.testing.assert_close(whole.states, single.states, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.logprobs, single.logprobs, rtol=0, atol=1e-5)


def test_batches_hold_every_row_once_and_stay_within_the_tokens() -> None:
    lengths = [5, 1, 30, 2, 7, 7, 3]
    found = list(batches(lengths, 16))
    assert sorted(row for rows in found for row in rows) == list(range(7))
    sizes = [len(rows) * (max(lengths[row] for row in rows) + 1) for rows in found]
    assert all(size <= 16 or len(rows) == 1 for size, rows in zip(sizes, found, strict=True)) and len(found) < 7
    assert list(batches([], 16)) == []


def test_states_that_are_not_finite_are_refused(policy: RunPolicy) -> None:
    lm = tiny_policy().actor.lm
    with torch.no_grad():
        lm.get_output_embeddings().weight.fill_(torch.inf)
    broken = RunPolicy(policy.checkpoint, {"data": {}}, policy.tokenizer, Actor(lm))
    with pytest.raises(InputError, match=r"hidden states of iteration_000001\.ckpt are not finite"):
        broken.measure([[3, 4]])
    lm = tiny_policy().actor.lm
    table: Any = lm.get_input_embeddings()
    with torch.no_grad():
        table.weight[5].fill_(torch.inf)
    one = RunPolicy(policy.checkpoint, {"data": {}}, policy.tokenizer, Actor(lm))
    assert one.measure([[3], [4]]).states.isfinite().all()
    with pytest.raises(InputError, match="are not finite"):
        one.measure([[3], [5]])


def test_a_model_in_low_precision_is_measured_in_float32(policy: RunPolicy) -> None:
    low = RunPolicy(policy.checkpoint, {"data": {}}, policy.tokenizer, tiny_policy().actor.to(torch.bfloat16))
    found, expected = low.measure([[3, 4, 5]]), policy.measure([[3, 4, 5]])
    assert found.states.dtype == torch.float32
    torch.testing.assert_close(found.states, expected.states, rtol=0.05, atol=0.05)


OWN = """
import numpy as np, torch

def lengths(texts):
    return [[len(text), 1.0] for text in texts]

def tensors(texts, scale=1.0):
    return torch.tensor([[len(text) * scale] for text in texts], dtype=torch.bfloat16, requires_grad=True)

class Model:
    def __init__(self, width):
        self.width = width

    def __call__(self, texts):
        return np.ones((len(texts), self.width))

class Silent:
    pass

def flat(texts):
    return [1.0] * len(texts)

def short(texts):
    return np.zeros((1, 2))

def empty(texts):
    return np.zeros((len(texts), 0))

def hole(texts):
    found = np.zeros((len(texts), 2))
    found[1, 1] = np.nan
    return found

def words(texts):
    return [["a"] for text in texts]

def raises(texts):
    raise KeyError("model")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_vectors.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("own_vectors.lengths", [[1, 1], [2, 1]]),
        ("own_vectors.tensors", [[1], [2]]),
        ("{_target_: own_vectors.tensors, scale: 2}", [[2], [4]]),
        ("{_target_: own_vectors.Model, width: 3}", [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_a_function_or_an_object_makes_vectors(own: Any, words: str, expected: list[list[float]]) -> None:
    found = embedded(make_embedding(words), ["a", "bc"])
    assert found.tolist() == expected and found.dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("own_vectors.lenghts", "--embedding own_vectors.lenghts: own_vectors has no 'lenghts'; did you mean"),
        ("nowhere.model", "there is no module 'nowhere'"),
        ("model", "--embedding model: the import path of a class or function"),
        ("{_target_: [", "cannot be read"),
        ("{_target_: 3}", "is not allowed: an import path, or a block"),
        ("own_vectors.Model", "--embedding: "),
        ("own_vectors.Silent", "own_vectors.Silent makes Silent, which cannot be called with texts"),
        ("own_vectors.flat", r"the shape is [2] for 2 texts; allowed: [2, D]"),
        ("own_vectors.short", r"the shape is [1, 2] for 2 texts; allowed: [2, D]"),
        ("own_vectors.empty", r"the shape is [2, 0] for 2 texts"),
        ("own_vectors.hole", "the vector of text 1 holds NaN or infinity: 'bc'"),
        ("own_vectors.words", "--embedding: could not convert string to float"),
        ("own_vectors.raises", "--embedding: KeyError: 'model'"),
    ],
)
def test_what_makes_no_vectors_is_told(own: Any, words: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        embedded(make_embedding(words), ["a", "bc"])
    assert said in str(refused.value)


def test_numbers_beyond_float32_are_not_finite() -> None:
    with pytest.raises(InputError, match="holds NaN or infinity"):
        embedded(lambda texts: np.full((len(texts), 1), 1e300), ["a"])


# --- new prompts -------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(policy: RunPolicy, compose: Any) -> RunPolicy:
    """A policy of a run whose data has everything that new prompts do not follow; its own file is gone."""
    words = ["data=jsonl", "data.train.path=gone.jsonl", "data.prompt_field=question", "data.text_as_chat=true"]
    words += [
        "data.validation_size=3",
        "data.blacklist=gone.txt",
        "data.group_column=level",
        "data.max_prompt_tokens=6",
    ]
    config = OmegaConf.to_container(compose(*words), resolve=True)
    return RunPolicy(policy.checkpoint, config, policy.tokenizer, policy.actor)


def write_rows(path: str, *rows: Any) -> None:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def test_new_prompts_are_read_as_the_run_reads_its_own(reader: RunPolicy) -> None:
    rows = [{"question": "1+1="}, {"question": [{"role": "user", "content": "2+2="}]}, {"question": "123456789"}]
    write_rows("new.jsonl", *rows, {"question": "1+1="})
    prompts, too_long = reader.read("new.jsonl")
    assert [prompt.key for prompt in prompts] == [prompt_key(text) for text in ("1+1=", "2+2=", "1+1=")]
    assert [prompt.row[MESSAGES_KEY][0]["content"] for prompt in prompts] == ["1+1=", "2+2=", "1+1="]
    assert [prompt.ids for prompt in prompts[:2]] == [reader.tokenizer(text)["input_ids"] for text in ("1+1=", "2+2=")]
    assert [prompt.row[SOURCE_KEY].rpartition("/")[2] for prompt in prompts] == [f"new.jsonl:{n}" for n in (1, 2, 4)]
    assert too_long == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "there is no file "),
        ([], "holds no row"),
        ([{"question": "1="}, '{"question": ', {"prompt": "1="}], "--screen new.jsonl: 2 rows cannot be used:\n  "),
        ([{"question": "1=?"}], "'?'"),
        ([{"question": "1234567"}], "longer than data.max_prompt_tokens = 6"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(reader: RunPolicy, rows: list[Any] | None, said: str) -> None:
    if rows is not None:
        write_rows("new.jsonl", *rows)
    with pytest.raises(InputError) as refused:
        reader.read("new.jsonl")
    assert str(refused.value).startswith("--screen new.jsonl: ") and said in str(refused.value)
    assert "data.train" not in str(refused.value)
