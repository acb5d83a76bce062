"""From plain lists to a rollout; incomplete answers are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lightning_rlhf.experience import Finish, sample_seed
from lightning_rlhf.rollout.assemble import Generated, assemble_rollout, finish_code, row_seeds
from lightning_rlhf.rollout.binding import check_finite


def test_rows_become_tensors(make_prompts: Callable) -> None:
    prompts = make_prompts([5, 6, 7], [8])
    responses = [
        Generated([1, 2], [-0.5, -0.25], "length", 3),
        Generated([9], [-1.0], "stop", 3),
        Generated([4, 4, 9], [-0.1, -0.2, -0.3], "stop", 4),
        Generated([0], [-2.0], "length", 4),
    ]
    seeds = row_seeds(prompts, 2, 11)
    rollout = assemble_rollout(prompts, responses, seeds, pad_id=0)
    assert rollout.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 7], [0, 0, 8], [0, 0, 8]]
    assert rollout.prompt_mask.sum(-1).tolist() == [3, 3, 1, 1]
    assert rollout.response_ids.tolist() == [[1, 2, 0], [9, 0, 0], [4, 4, 9], [0, 0, 0]]
    assert rollout.response_lengths.tolist() == [2, 1, 3, 1]  # an id equal to padding counts
    expected = torch.tensor([[-0.5, -0.25, 0], [-1.0, 0, 0], [-0.1, -0.2, -0.3], [-2.0, 0, 0]])
    assert torch.equal(rollout.rollout_logprobs, expected) and rollout.rollout_logprobs.dtype == torch.float32
    natural, cut = int(Finish.NATURAL), int(Finish.TRUNCATED)
    assert rollout.finish.tolist() == [cut, natural, natural, cut]
    assert rollout.policy_version.tolist() == [3, 3, 4, 4] and rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.prompt_key == [key for key in prompts.keys for _ in range(2)]
    assert rollout.seed.tolist() == seeds == [sample_seed(11, key, i, 0) for key in prompts.keys for i in range(2)]


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_response_that_was_not_completed_is_refused(make_prompts: Callable, reason: str | None) -> None:
    prompts = make_prompts([5])
    with pytest.raises(
        RuntimeError, match=f"prompt {prompts.keys[0]} .*finish reason {reason!r}, allowed are stop, le"
    ):
        assemble_rollout(prompts, [Generated([1], [-0.5], reason, 0)], [1], pad_id=0)


def test_finish_reasons() -> None:
    assert (finish_code("stop"), finish_code("length")) == (Finish.NATURAL, Finish.TRUNCATED)


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([Generated([], [], "stop", 0)] * 2, "0 tokens and 0 log-probabilities"),
        ([Generated([1, 2], [-0.5], "stop", 0)] * 2, "2 tokens and 1 log-probabilities"),
        ([Generated([1], [-0.5], "stop", 0)], "1 responses to 2 prompts"),
        ([], "0 responses to 2 prompts"),
    ],
)
def test_missing_rows_and_tokens_are_refused(make_prompts: Callable, responses: list, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        assemble_rollout(make_prompts([5], [6]), responses, [1] * len(responses), pad_id=0)


def test_a_log_probability_that_is_not_finite_stays_and_can_be_refused(make_prompts: Callable) -> None:
    rollout = assemble_rollout(make_prompts([5]), [Generated([1, 2], [-0.5, math.nan], "stop", 7)], [1], pad_id=0)
    assert rollout.rollout_logprobs[0, 0] == -0.5 and rollout.rollout_logprobs[0, 1].isnan()
    with pytest.raises(FloatingPointError, match=r"response token 1 .*policy version 7"):
        check_finite(rollout)
