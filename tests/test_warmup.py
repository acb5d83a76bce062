"""Warm-up: trains answers only, is deterministic and cached, and the cache changes nothing but the time."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_rlhf import warmup
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.models import LoadedModel, build_tiny, fingerprint

SETTINGS = {"steps": 6, "batch_size": 8, "lr": 1e-2, "seed": 3}


@pytest.fixture
def loaded() -> LoadedModel:
    return build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16)


@pytest.fixture
def datamodule(loaded: LoadedModel) -> PromptDataModule:
    return PromptDataModule(
        ArithmeticTask(max_value=9),
        ArithmeticTask(max_value=9, split="validation"),
        tokenizer=loaded.tokenizer,
        prompts_per_iteration=4,
        iterations=1,
    )


def run(loaded: LoadedModel, datamodule: PromptDataModule, cache: Path, **changes) -> tuple[warmup.WarmUp, str]:
    fresh = LoadedModel(copy.deepcopy(loaded.lm), loaded.tokenizer, loaded.source)
    result = warmup.warm_up(fresh, datamodule, cache_dir=cache, **{**SETTINGS, **changes})
    return result, fingerprint(fresh.lm)


def test_loss_falls(loaded, datamodule, tmp_path):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")
    before = warmup.answer_loss(loaded.lm, rows[:32]).item()
    result, _ = run(loaded, datamodule, tmp_path, steps=60)
    assert result.steps == 60
    assert result.loss < 0.7 * before


def test_target_ends_it_early(loaded, datamodule, tmp_path):
    result, _ = run(loaded, datamodule, tmp_path, steps=60, target=2.0)
    assert 0 < result.steps < 60
    assert result.loss < 2.0


def test_loss_counts_answer_and_end_token_only(loaded):
    eos = loaded.tokenizer.eos_token_id
    prompt, answer = loaded.tokenizer("1+2=")["input_ids"], loaded.tokenizer("3")["input_ids"]
    row = ([*prompt, *answer, eos], len(prompt))
    logprobs = loaded.lm(torch.tensor([row[0]])).logits[0].float().log_softmax(-1)
    expected = -(logprobs[len(prompt) - 1, answer[0]] + logprobs[len(prompt), eos]) / 2
    assert warmup.answer_loss(loaded.lm, [row]).item() == pytest.approx(expected.item(), abs=1e-6)


def test_loss_of_a_batch_is_the_mean_over_its_answer_tokens(loaded, datamodule):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")[:5]
    tokens = [len(ids) - prompt for ids, prompt in rows]
    alone = [warmup.answer_loss(loaded.lm, [row]).item() for row in rows]
    expected = sum(n * loss for n, loss in zip(tokens, alone, strict=True)) / sum(tokens)
    assert warmup.answer_loss(loaded.lm, rows).item() == pytest.approx(expected, abs=1e-5)


def test_held_out_rows_are_not_trained(loaded, datamodule):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")
    trained = {tuple(ids[:length]) for ids, length in rows}
    assert datamodule.validation_prompts
    assert not trained & {tuple(prompt.ids) for prompt in datamodule.validation_prompts}
    assert len(rows) == len(datamodule.train_prompts)


def test_cached_result_is_the_trained_one_bit_for_bit(loaded, datamodule, tmp_path):
    first, trained = run(loaded, datamodule, tmp_path)
    second, from_cache = run(loaded, datamodule, tmp_path)
    _, elsewhere = run(loaded, datamodule, tmp_path / "other")
    assert (first.cached, second.cached) == (False, True)
    assert trained == from_cache == elsewhere != fingerprint(loaded.lm)
    assert (second.steps, second.loss) == (first.steps, first.loss)


def test_random_state_is_the_same_cached_or_not(loaded, datamodule, tmp_path):
    draws = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        run(loaded, datamodule, tmp_path)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draws == [(random.random(), np.random.rand(), torch.rand(()).item())] * 2


@pytest.mark.parametrize("change", [{"steps": 7}, {"batch_size": 9}, {"lr": 2e-2}, {"target": 0.1}, {"seed": 4}])
def test_other_settings_are_other_entries(loaded, datamodule, tmp_path, change):
    run(loaded, datamodule, tmp_path)
    result, _ = run(loaded, datamodule, tmp_path, **change)
    assert not result.cached


def test_other_weights_data_and_versions_are_other_keys(loaded, datamodule, monkeypatch):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")
    keys = {warmup.cache_key(loaded.lm, rows, SETTINGS), warmup.cache_key(loaded.lm, rows[1:], SETTINGS)}
    other = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16, seed=9)
    keys.add(warmup.cache_key(other.lm, rows, SETTINGS))
    monkeypatch.setattr(warmup, "__version__", "9.9")
    keys.add(warmup.cache_key(loaded.lm, rows, SETTINGS))
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["truncated", "other weights", "not a file of weights"])
def test_broken_cache_file_is_made_anew(loaded, datamodule, tmp_path, caplog, damage):
    first, trained = run(loaded, datamodule, tmp_path)
    content = bytearray(first.path.read_bytes())
    if damage == "truncated":
        content = content[:100]
    elif damage == "other weights":
        content[-3] ^= 0xFF
    else:
        content = bytearray(b"hello")
    first.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        second, again = run(loaded, datamodule, tmp_path)
    assert "cannot be used" in caplog.text
    assert not second.cached
    assert again == trained
    assert run(loaded, datamodule, tmp_path)[0].cached
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_a_writer_that_dies_leaves_nothing(loaded, datamodule, tmp_path, monkeypatch):
    def fails(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(warmup.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        run(loaded, datamodule, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_RLHF_CACHE", str(tmp_path))
    assert warmup.cache_folder() == tmp_path
    assert warmup.cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("LIGHTNING_RLHF_CACHE")
    assert warmup.cache_folder() == Path.home() / ".cache" / "lightning_rlhf"


def test_training_mode_is_restored(loaded, datamodule, tmp_path):
    loaded.lm.eval()
    warmup.warm_up(loaded, datamodule, cache_dir=tmp_path, **SETTINGS)
    assert not loaded.lm.training


@pytest.mark.parametrize("name", ["steps", "batch_size", "lr", "target"])
def test_bad_settings(loaded, datamodule, tmp_path, name):
    with pytest.raises(ValueError, match=rf"warmup\.{name} = -1 is not allowed"):
        run(loaded, datamodule, tmp_path, **{name: -1})


def test_row_without_answer(loaded, datamodule, tmp_path):
    with pytest.raises(ValueError, match=r"warmup\.answer_field = 'solution'"):
        run(loaded, datamodule, tmp_path, answer_field="solution")
