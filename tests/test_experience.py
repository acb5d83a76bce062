"""Rollout, Experience and MiniBatch: selection, cutting, splitting by tokens, seeds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.experience import (
    Experience,
    MiniBatch,
    PromptBatch,
    Rollout,
    prompt_key,
    sample_seed,
    split_by_tokens,
)
from lightning_rlhf.functional.losses import LossScale


def rollout(lengths: list[tuple[int, int]]) -> Rollout:
    """Rows with the given numbers of prompt and response tokens; the ids encode row, position and side."""
    rows, p = len(lengths), max(n for n, _ in lengths)
    r = max(1, max(n for _, n in lengths))
    prompt_mask = torch.zeros(rows, p, dtype=torch.bool)
    response_mask = torch.zeros(rows, r, dtype=torch.bool)
    for i, (prompt, response) in enumerate(lengths):
        prompt_mask[i, p - prompt :] = True
        response_mask[i, :response] = True
    column = torch.arange(rows).unsqueeze(1) * 1000
    return Rollout(
        prompt_ids=(column + torch.arange(p)) * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=(column + 500 + torch.arange(r)) * response_mask,
        response_mask=response_mask,
        rollout_logprobs=torch.zeros(rows, r),
        finish=torch.zeros(rows, dtype=torch.long),
        policy_version=torch.zeros(rows, dtype=torch.long),
        seed=torch.arange(rows),
        group=torch.arange(rows),
        prompt_key=[str(i) for i in range(rows)],
    )


def test_select_takes_rows_of_tensors_lists_and_terms() -> None:
    data = rollout([(2, 1), (1, 3), (3, 2)])
    experience = Experience.from_rollout(data, ["p0", "p1", "p2"], ["a", "b", "c"])
    experience.components = {"exact": torch.tensor([0.0, 1.0, 2.0])}
    chosen = experience.select(torch.tensor([2, 0]))
    assert chosen.texts == ["c", "a"] and chosen.prompts == ["p2", "p0"] and chosen.prompt_key == ["2", "0"]
    assert chosen.components["exact"].tolist() == [2.0, 0.0]
    assert chosen.seed.tolist() == [2, 0] and chosen.lengths() == [(3, 2), (2, 1)]


def test_every_tensor_goes_to_the_device_those_of_reward_terms_too() -> None:
    """The meta device is another one on every machine."""
    data = rollout([(2, 1), (1, 3)])
    experience = Experience.from_rollout(data, ["p0", "p1"], ["a", "b"])
    experience.scores, experience.components = torch.ones(2), {"exact": torch.ones(2)}
    moved = experience.to("meta")
    assert moved.scores is not None and moved.components.keys() == {"exact"}
    found = [moved.prompt_ids, moved.response_mask, moved.scores, moved.components["exact"]]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert experience.components["exact"].device.type == "cpu", "the former one stays where it was"


def test_cut_keeps_the_right_end_of_prompts_and_the_left_end_of_responses() -> None:
    data = rollout([(1, 2), (3, 4)]).select(torch.tensor([0])).trim()
    assert data.prompt_ids.shape == (1, 1) and data.response_ids.tolist() == [[500, 501]]
    ids, mask = data.concatenated()
    assert ids.tolist() == [[2, 500, 501]] and mask.all()


def test_a_minibatch_passes_its_denominators_to_its_parts() -> None:
    experience = Experience.from_rollout(rollout([(2, 3)] * 4), ["p"] * 4, ["t"] * 4)
    minibatch = MiniBatch.from_experience(experience, torch.tensor([0, 1, 3]), LossScale(tokens=9.0, sequences=3.0))
    parts = [part for _, part in split_by_tokens(minibatch, minibatch.lengths(), budget=5)]
    assert [(part.tokens, part.sequences, len(part)) for part in parts] == [(9.0, 3.0, 1)] * 3


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_parts_hold_each_row_once_lose_no_token_and_keep_the_budget(
    lengths: list[tuple[int, int]], budget: int, most: int | None
) -> None:
    data = rollout(lengths)
    seen: list[int] = []
    for index, part in split_by_tokens(data, data.lengths(), budget, most):
        seen += index.tolist()
        ids, mask = part.concatenated()
        assert len(part) == 1 or ids.numel() <= budget
        assert most is None or len(part) <= most
        assert part.lengths() == [lengths[i] for i in index.tolist()]
        whole_ids, whole_mask = data.select(index).concatenated()
        for row in range(len(part)):
            assert torch.equal(ids[row][mask[row]], whole_ids[row][whole_mask[row]])
    assert sorted(seen) == list(range(len(lengths)))


def test_prompts_repeat_side_by_side() -> None:
    batch = PromptBatch(ids=[[1], [2]], texts=["a", "b"], keys=["x", "y"], rows=[{}, {}], passes=[0, 1])
    twice = batch.repeat(2)
    assert twice.texts == ["a", "a", "b", "b"] and twice.passes == [0, 0, 1, 1] and len(twice) == 4


def test_keys_and_seeds_are_the_same_everywhere_and_differ_in_every_argument() -> None:
    assert prompt_key("12+34=") == "9d54521500d9b86b"
    base = sample_seed(1, "key", 0, 0)
    others = {sample_seed(2, "key", 0, 0), sample_seed(1, "kez", 0, 0), sample_seed(1, "key", 1, 0)}
    others.add(sample_seed(1, "key", 0, 1))
    assert base == sample_seed(1, "key", 0, 0) and len(others | {base}) == 5
    assert 0 <= base < 2**63
