"""The embedded engine: what it returns, what it does not depend on, what it refuses."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rlhf.experience import Finish, Rollout, sample_seed
from lightning_rlhf.rollout import HFEngine, RolloutEngine
from lightning_rlhf.rollout.base import length_mask, pad_left
from lightning_rlhf.rollout.binding import check_finite

ENDS = [7, *range(20, 28)]
PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [3])


@pytest.fixture
def bind(make_tokenizer: Callable) -> Callable[..., HFEngine]:
    """``bind(lm, eos=..., pad=..., temperature=...)``: an engine that is set up."""

    def _bind(lm: Any, *, eos: int | None = None, pad: int | None = 0, **settings: Any) -> HFEngine:
        engine = HFEngine(**settings)
        engine.setup(lm, make_tokenizer(eos, pad))
        return engine

    return _bind


def run(engine: RolloutEngine, prompts: Any, **changes: Any) -> Rollout:
    return engine.generate(prompts, **{"samples": 1, "max_new_tokens": 12, "seed": 1} | changes)


def responses(rollout: Rollout) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)]


# --- what a rollout holds ------------------------------------------------------------------------------------------


def test_shapes_and_fields(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    engine: RolloutEngine = bind(lm)
    assert isinstance(engine, RolloutEngine)
    engine.update_weights(17)
    prompts = make_prompts(*PROMPTS, data_pass=2)
    rollout = run(engine, prompts, samples=3)
    assert rollout.prompt_ids.shape == rollout.prompt_mask.shape == (12, 8)
    assert rollout.response_ids.shape == rollout.response_mask.shape == rollout.rollout_logprobs.shape == (12, 12)
    assert [row[mask].tolist() for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)] == [
        ids for ids in prompts.ids for _ in range(3)
    ]
    assert rollout.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert rollout.prompt_key == [key for key in prompts.keys for _ in range(3)]
    assert rollout.policy_version.tolist() == [17] * 12
    assert rollout.seed.tolist() == [sample_seed(1, key, sample, 2) for key in prompts.keys for sample in range(3)]
    assert rollout.rollout_logprobs.dtype == torch.float32


def test_token_ids_travel_unchanged(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    """Text is never encoded again: a tokenizer that would merge "1 2" into another id is not even asked."""
    rollout = run(bind(counter), make_prompts([0]), max_new_tokens=2)
    assert responses(rollout) == [[1, 2]]
    assert rollout.rollout_logprobs.shape == (1, 2)


def test_mask_counts_generated_tokens_with_and_without_end_token() -> None:
    assert length_mask(torch.tensor([2, 2]), 4).tolist() == [[True, True, False, False]] * 2


def test_mask_is_not_taken_from_the_ids(markov: Callable, bind: Callable, make_prompts: Callable) -> None:
    """Pad (0) is drawn as an ordinary token, and pad 0 follows the end token 2: both are told apart by length."""
    follow = torch.tensor([6, 0, 2, 3, 4, 6, 2, 0])  # 7 -> 0 -> 6 -> 2 (end);  5 -> 6 -> 2 (end)
    lm = markov(30.0 * torch.nn.functional.one_hot(follow, 8).float())
    rollout = run(bind(lm, eos=2, pad=0), make_prompts([7], [5]), max_new_tokens=5)
    assert rollout.response_ids.tolist() == [[0, 6, 2], [6, 2, 0]]
    assert rollout.response_mask.tolist() == [[True, True, True], [True, True, False]]
    assert rollout.finish.tolist() == [Finish.NATURAL, Finish.NATURAL]


def test_a_row_cut_at_the_limit_has_no_end_token_and_a_full_mask(
    counter: Any, bind: Callable, make_prompts: Callable
) -> None:
    rollout = run(bind(counter, eos=2, pad=0), make_prompts([4], [1]), max_new_tokens=2)
    assert rollout.response_ids.tolist() == [[5, 6], [2, 0]]
    assert rollout.response_mask.tolist() == [[True, True], [True, False]]
    assert rollout.finish.tolist() == [Finish.TRUNCATED, Finish.NATURAL]


def test_pad_may_equal_the_end_token(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    rollout = run(bind(counter, eos=9, pad=9), make_prompts([7], [9, 5]))
    assert rollout.response_ids.tolist() == [[8, 9, 9, 9], [6, 7, 8, 9]]
    assert rollout.response_lengths.tolist() == [2, 4]
    assert rollout.prompt_ids.tolist() == [[9, 7], [9, 5]]
    assert rollout.prompt_mask.tolist() == [[False, True], [True, True]]


def test_an_end_token_in_the_last_column_is_natural(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    rollout = run(bind(counter, eos=9), make_prompts([6], [5]), max_new_tokens=3)
    assert responses(rollout) == [[7, 8, 9], [6, 7, 8]]
    assert rollout.finish.tolist() == [Finish.NATURAL, Finish.TRUNCATED]


def test_the_longest_response_sets_the_width(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    assert run(bind(counter, eos=9), make_prompts([7], [8])).response_ids.shape == (2, 2)


def test_all_end_tokens_count(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    counter.generation_config.eos_token_id = [4, 6]
    counter.config.eos_token_id = 8
    engine = bind(counter, eos=9, stop_token_ids=[2])
    assert responses(run(engine, make_prompts([0], [2], [4], [6], [8]))) == [[1, 2], [3, 4], [5, 6], [7, 8], [9]]
    assert engine.describe()["stop_token_ids"] == [2, 4, 6, 8, 9]


def test_end_tokens_can_be_ignored(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    engine = bind(counter, eos=3, ignore_eos=True)
    rollout = run(engine, make_prompts([1]), max_new_tokens=4)
    assert responses(rollout) == [[2, 3, 4, 5]]
    assert rollout.finish.tolist() == [Finish.TRUNCATED]
    assert engine.describe()["stop_token_ids"] == []


# --- log-probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_one_against_a_full_forward(
    lm: PreTrainedModel, bind: Callable, make_prompts: Callable, rescore: Callable, temperature: float
) -> None:
    rollout = run(bind(lm, stop_token_ids=ENDS, temperature=temperature), make_prompts(*PROMPTS), samples=4)
    assert len(set(rollout.response_lengths.tolist())) > 2, "rows of several lengths are what is tested"
    ratio = (rescore(lm, rollout, temperature) - rollout.rollout_logprobs).exp()
    assert (ratio - 1).abs().max() <= 1e-5
    assert (rollout.rollout_logprobs[~rollout.response_mask] == 0).all()


def test_padding_changes_nothing(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    engine = bind(lm)
    alone = run(engine, make_prompts([3, 1, 4]), greedy=True)
    padded = run(engine, make_prompts([3, 1, 4], list(range(10, 20))), greedy=True)
    assert padded.prompt_mask[0].sum() == 3 and padded.prompt_mask.shape[1] == 10
    assert padded.response_ids[0].tolist() == alone.response_ids[0].tolist()
    torch.testing.assert_close(padded.rollout_logprobs[0], alone.rollout_logprobs[0], atol=1e-5, rtol=0)


def test_temperature_and_top_k_act(markov: Callable, bind: Callable, make_prompts: Callable) -> None:
    lm = markov(torch.tensor([0.5, 0.3, 0.2]).log().expand(3, 3).clone())
    rollout = run(bind(lm, top_k=2), make_prompts([0]), samples=50)
    expected = torch.tensor([0.625, 0.375]).log()[rollout.response_ids]
    torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=1e-6, rtol=0)
    lm = markov(torch.tensor([2.0, 0.0]).expand(2, 2).clone())
    rollout = run(bind(lm, temperature=0.5), make_prompts([0]), samples=50)
    expected = torch.tensor([-0.018150, -4.018150])[rollout.response_ids]
    torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token_whatever_the_seed(
    markov: Callable, bind: Callable, make_prompts: Callable
) -> None:
    lm = markov(torch.tensor([0.3, 0.4, 0.3]).log().expand(3, 3).clone())
    rollout = run(bind(lm), make_prompts([0], [1]), samples=5, greedy=True)
    assert (rollout.response_ids == 1).all()
    torch.testing.assert_close(rollout.rollout_logprobs.exp(), torch.full((10, 12), 0.4), atol=1e-6, rtol=0)


def test_frequencies_match_the_distribution(markov: Callable, bind: Callable, make_prompts: Callable) -> None:
    lm = markov(torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4, 4).clone())
    rollout = run(bind(lm, top_p=0.85), make_prompts([0], [1]), samples=250, max_new_tokens=20)
    probs = torch.tensor([0.0, 0.4, 0.2, 0.3]) / 0.9
    frequency = torch.bincount(rollout.response_ids.flatten(), minlength=4) / 10_000
    assert ((frequency - probs).abs() <= 4 * (probs * (1 - probs) / 10_000).sqrt()).all()


def test_bfloat16_weights_give_float32_logprobs(llama: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    rollout = run(bind(llama.bfloat16()), make_prompts(*PROMPTS))
    assert rollout.rollout_logprobs.dtype == torch.float32
    assert rollout.rollout_logprobs.isfinite().all() and (rollout.rollout_logprobs < 0).all()


# --- determinism ---------------------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_the_batch(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    """Alone, with others that end sooner or later, in another order, in small parts: the same tokens."""
    engine = bind(lm, stop_token_ids=ENDS)
    together = responses(run(engine, make_prompts(*PROMPTS), samples=2))
    assert len({len(ids) for ids in together}) > 2
    for index, ids in enumerate(PROMPTS):
        assert responses(run(engine, make_prompts(ids), samples=2)) == together[2 * index : 2 * index + 2]
    backwards = responses(run(engine, make_prompts(*reversed(PROMPTS)), samples=2))
    assert [backwards[i] for i in (6, 7, 4, 5, 2, 3, 0, 1)] == together


@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_a_limit_on_the_batch_changes_no_sample(
    lm: PreTrainedModel, bind: Callable, make_prompts: Callable, limit: int
) -> None:
    whole = run(bind(lm, stop_token_ids=ENDS), make_prompts(*PROMPTS), samples=3)
    parts = run(bind(lm, stop_token_ids=ENDS, max_batch_tokens=limit), make_prompts(*PROMPTS), samples=3)
    assert torch.equal(parts.response_ids, whole.response_ids)
    assert torch.equal(parts.finish, whole.finish)
    torch.testing.assert_close(parts.rollout_logprobs, whole.rollout_logprobs, atol=1e-5, rtol=0)


def test_the_limit_bounds_the_rows_of_a_forward(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    engine = bind(counter, max_batch_tokens=35)  # rows of 2 + 8 columns: three at a time
    run(engine, make_prompts([0, 1], [1]), samples=4, max_new_tokens=8)
    assert max(counter.rows_per_forward) == 3


def test_same_seed_same_tokens_and_no_global_state(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    engine, prompts = bind(lm), make_prompts(*PROMPTS)
    torch.manual_seed(5)
    before = (torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state()))
    first = run(engine, prompts)
    assert (torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())) == before
    torch.manual_seed(6)
    assert torch.equal(run(engine, prompts).response_ids, first.response_ids)


def test_seed_pass_and_sample_index_each_change_the_sample(
    lm: PreTrainedModel, bind: Callable, make_prompts: Callable
) -> None:
    engine = bind(lm)
    first = run(engine, make_prompts([3, 1]), samples=3)
    assert len({tuple(ids) for ids in responses(first)}) == 3
    assert responses(run(engine, make_prompts([3, 1]), seed=2))[0] not in responses(first)
    assert responses(run(engine, make_prompts([3, 1], data_pass=1)))[0] not in responses(first)


def test_a_shorter_limit_cuts_the_same_sample(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    engine = bind(lm)
    long, short = (run(engine, make_prompts(*PROMPTS), max_new_tokens=n) for n in (12, 5))
    assert torch.equal(short.response_ids, long.response_ids[:, :5])


def test_inference_mode_changes_nothing(lm: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    """Lightning validates in inference mode."""
    engine = bind(lm)
    expected = run(engine, make_prompts(*PROMPTS))
    with torch.inference_mode():
        assert torch.equal(run(engine, make_prompts(*PROMPTS)).response_ids, expected.response_ids)


def test_new_weights_act_at_once(
    llama: PreTrainedModel, bind: Callable, make_prompts: Callable, rescore: Callable
) -> None:
    engine = bind(llama)
    old = run(engine, make_prompts(*PROMPTS))
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(1.05)
    engine.update_weights(1)
    new = run(engine, make_prompts(*PROMPTS))
    assert not torch.equal(new.rollout_logprobs, old.rollout_logprobs)
    torch.testing.assert_close(new.rollout_logprobs, rescore(llama, new), atol=1e-4, rtol=0)


# --- cost ----------------------------------------------------------------------------------------------------------


def test_finished_rows_leave_the_batch(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    rollout = run(bind(counter, eos=9), make_prompts(*[[last] for last in range(1, 9)]))
    assert rollout.response_lengths.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert counter.rows_per_forward == [8, 7, 6, 5, 4, 3, 2, 1]


def test_few_finished_rows_wait_until_leaving_pays(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    rollout = run(bind(counter, eos=9), make_prompts([8], *[[1]] * 15))
    assert counter.rows_per_forward == [16] * 8
    assert rollout.response_lengths.tolist() == [1] + [8] * 15


def test_each_prompt_is_read_once(counter: Any, bind: Callable, make_prompts: Callable) -> None:
    run(bind(counter), make_prompts([1, 2], [3]), samples=5, max_new_tokens=3)
    assert counter.rows_per_forward == [2, 10, 10]


def test_logits_are_computed_for_the_last_position_only(
    llama: PreTrainedModel, bind: Callable, make_prompts: Callable
) -> None:
    columns: list[int] = []
    llama.lm_head.register_forward_hook(lambda module, args, output: columns.append(output.shape[1]))
    run(bind(llama), make_prompts(*PROMPTS), max_new_tokens=3)
    assert columns == [1, 1, 1]


# --- settings from elsewhere ---------------------------------------------------------------------------------------


def test_the_generation_config_of_the_checkpoint_does_not_act(
    llama: PreTrainedModel, bind: Callable, make_prompts: Callable
) -> None:
    expected = run(bind(llama), make_prompts(*PROMPTS))
    smuggled = {
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.2,
        "min_p": 0.5,
        "typical_p": 0.3,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": expected.response_ids.unique().tolist(),
        "forced_eos_token_id": 3,
        "max_length": 9,
        "max_new_tokens": 2,
        "num_beams": 4,
    }
    for name, value in smuggled.items():
        setattr(llama.generation_config, name, value)
    engine = bind(llama)
    assert torch.equal(run(engine, make_prompts(*PROMPTS)).response_ids, expected.response_ids)
    assert engine.describe()["ignored_generation_config"] == smuggled


def test_every_setting_is_described(llama: PreTrainedModel, bind: Callable) -> None:
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "samples": 2, "max_new_tokens": 8, "max_batch_tokens": 99}
    settings |= {"lag": 1, "max_staleness": 2}
    described = bind(llama, eos=3, stop_token_ids=[4], **settings).describe()
    expected = {"engine": "hf", "stop_token_ids": [3, 4], "ignore_eos": False, "ignored_generation_config": {}}
    assert described == settings | expected


def test_excluded_tokens_are_warned_about(
    llama: PreTrainedModel, bind: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bind(llama, eos=3)
        assert not caplog.records
        bind(llama, eos=3, top_k=5)
    assert "rollout.top_k = 5" in caplog.text and "whole vocabulary" in caplog.text


def test_a_missing_end_token_is_warned_about(
    llama: PreTrainedModel, bind: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    bind(llama)
    assert "no end token is known" in caplog.text


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [True, False], ids=["peft model", "injected"])
def test_lora_adapters_act(
    llama: PreTrainedModel, bind: Callable, make_prompts: Callable, rescore: Callable, wrapped: bool
) -> None:
    peft = pytest.importorskip("peft")
    plain = run(bind(llama), make_prompts(*PROMPTS))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    adapted = peft.get_peft_model(llama, config) if wrapped else llama
    if not wrapped:
        peft.inject_adapter_in_model(config, llama)
    adapted.train()
    engine = bind(adapted)
    rollout = run(engine, make_prompts(*PROMPTS))
    assert adapted.training
    adapted.eval()
    assert not torch.equal(rollout.response_ids, plain.response_ids)
    torch.testing.assert_close(rollout.rollout_logprobs, rescore(adapted, rollout), atol=1e-5, rtol=0)


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": 0}, "rollout.temperature = 0 is not allowed"),
        ({"stop_token_ids": 5}, "rollout.stop_token_ids = 5 is not allowed: a list"),
        ({"stop_token_ids": [50]}, r"rollout.stop_token_ids = \[50\] is not allowed: token ids from 0 to 49, not 50"),
        ({"max_batch_tokens": 0}, "rollout.max_batch_tokens = 0 is not allowed"),
    ],
)
def test_bad_settings(llama: PreTrainedModel, bind: Callable, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bind(llama, **settings)


def test_bad_arguments(llama: PreTrainedModel, bind: Callable, make_prompts: Callable) -> None:
    engine = bind(llama)
    with pytest.raises(ValueError, match=r"rollout\.samples = 0"):
        run(engine, make_prompts([1]), samples=0)
    with pytest.raises(ValueError, match="no prompt"):
        run(engine, make_prompts())
    empty = make_prompts([1], [])
    with pytest.raises(ValueError, match=f"prompt {empty.keys[1]} has no token"):
        run(engine, empty)
    with pytest.raises(ValueError, match=r"max_new_tokens = 300.*2 tokens of prompt.*300 positions"):
        run(engine, make_prompts([1, 2]), max_new_tokens=300)


def test_use_before_setup() -> None:
    with pytest.raises(RuntimeError, match="setup"):
        HFEngine().describe()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported(
    llama: PreTrainedModel, bind: Callable, make_prompts: Callable, value: float
) -> None:
    engine, prompts = bind(llama, temperature=0.9, top_p=0.9), make_prompts(*PROMPTS)
    engine.update_weights(3)
    with torch.no_grad():
        llama.lm_head.weight[4] = value
    rollout = run(engine, prompts)
    assert rollout.rollout_logprobs[rollout.response_mask].isnan().all()
    with pytest.raises(FloatingPointError, match=rf"token 0 of prompt {prompts.keys[0]}.*version 3, 4 of 4 rows"):
        check_finite(rollout)


# --- padding -------------------------------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = pad_left([[5], [6, 7, 8]], 9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8]]
    assert mask.tolist() == [[False, False, True], [True, True, True]]
    assert isinstance(ids, Tensor) and ids.dtype == torch.int64 and mask.dtype == torch.bool
