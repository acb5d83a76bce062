"""Rows that repeat a prompt: each gets its own samples, the same in any batch, order and number of ranks."""

from __future__ import annotations

from collections import defaultdict

import pytest

from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.loaders import PromptStream
from lightning_rlhf.experience import PromptBatch, sample_seed
from lightning_rlhf.rollout.assemble import row_seeds
from tests.support import tiny_module

ROWS = [{"prompt": prompt} for prompt in ("1+1=", "2+2=", "1+1=", "3+3=", "1+1=", "2+2=", "1+1=", "4+4=")]


def module_of(rows, *, per_iteration: int, iterations: int, seed: int = 1, **changes) -> PromptDataModule:
    data = PromptDataModule(
        rows,
        tokenizer=tiny_module().tokenizer,
        prompts_per_iteration=per_iteration,
        iterations=iterations,
        seed=seed,
        **changes,
    )
    data.setup("fit")
    return data


def seeds_by_prompt(batches: list[PromptBatch]) -> dict[tuple[str, int], list[int]]:
    """The seeds of every prompt in every pass, sorted."""
    found = defaultdict(list)
    for batch in batches:
        for text, data_pass, seed in zip(batch.texts, batch.passes, row_seeds(batch, 1, 7), strict=True):
            found[text, data_pass].append(seed)
    return {key: sorted(seeds) for key, seeds in found.items()}


def test_eight_copies_of_a_prompt_get_eight_draws():
    module = tiny_module(max_new_tokens=6)
    data = module_of([{"prompt": "1+1="}] * 8, per_iteration=8, iterations=1)
    [batch] = list(data.train_dataloader())
    module.engine.setup(module.actor.lm, module.tokenizer)
    rollout = module.engine.generate(batch, samples=2, max_new_tokens=6, seed=7)
    assert len(set(rollout.seed.tolist())) == 16
    assert len({tuple(row) for row in rollout.response_ids.tolist()}) > 12, "16 draws of 6 tokens out of 17"
    again = module.engine.generate(batch.part(slice(3, 4)), samples=2, max_new_tokens=6, seed=7)
    assert again.seed.tolist() == rollout.seed[6:8].tolist(), "whoever else is in the batch"


def test_seeds_do_not_depend_on_order_batch_ranks_or_resume():
    whole = seeds_by_prompt(list(module_of(ROWS, per_iteration=8, iterations=3).train_dataloader()))
    assert [len(set(whole[f"{i}+{i}=", 0])) for i in (1, 2, 3, 4)] == [4, 2, 1, 1]
    assert not set(whole["1+1=", 0]) & set(whole["1+1=", 1]), "another pass"
    for changes in ({"per_iteration": 3, "iterations": 8}, {"per_iteration": 2, "iterations": 12, "seed": 5}):
        assert seeds_by_prompt(list(module_of(ROWS, **changes).train_dataloader())) == whole
    assert (
        seeds_by_prompt(list(module_of(ROWS, per_iteration=8, iterations=3, shuffle=False).train_dataloader())) == whole
    )
    data = module_of(ROWS, per_iteration=4, iterations=6)
    ranks = []
    for rank in range(2):
        data._loader.stream = PromptStream(len(ROWS), 4, seed=1, rank=rank, world=2)
        ranks += [data._loader.batch(c) for c in range(6)]
    assert seeds_by_prompt(ranks) == whole
    resumed = module_of(ROWS, per_iteration=4, iterations=6)
    first = list(resumed._loader)[:3]
    resumed.load_state_dict(data.state_dict() | {"consumed": 3})
    assert seeds_by_prompt([*first, *resumed._loader]) == whole


def test_the_first_copy_is_sampled_as_if_it_were_alone():
    alone = module_of([ROWS[0]], per_iteration=1, iterations=1, shuffle=False)._loader.batch(0)
    among = module_of(ROWS, per_iteration=8, iterations=1, shuffle=False)._loader.batch(0)
    assert among.copies == [0, 0, 1, 0, 2, 1, 3, 0]
    assert row_seeds(alone, 3, 7) == row_seeds(among, 3, 7)[:3]
    key = among.keys[0]
    assert row_seeds(alone, 1, 7) == [sample_seed(7, key, 0, 0)] == [sample_seed(7, key, 0, 0, 0)]
    assert sample_seed(7, "k", 0, 0) == 3108392218271513940, "as in every release"


def test_held_out_prompts_are_asked_once_and_copies_stay_together():
    data = module_of(ROWS, per_iteration=1, iterations=1, validation_size=1)
    held_out = data.validation_prompts[0].key
    copies = [prompt.copy for prompt in data.train_prompts if prompt.key != held_out]
    assert held_out not in {prompt.key for prompt in data.train_prompts}
    assert sorted(copies) in ([0, 0, 0, 1], [0, 0, 0, 1, 1, 2, 3], [0, 0, 1, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3])


@pytest.mark.parametrize("copies", [None, [], [0, 1, 0]])
def test_a_users_own_batch_may_omit_copies(copies):
    fields = [[[1], [1], [2]], ["a", "a", "b"], ["k", "k", "l"], [{}] * 3, [0] * 3]
    batch = PromptBatch(*fields, *([] if copies is None else [copies]))
    assert batch.copies == (copies or [0, 0, 0])
    assert batch.part(slice(1, 3)).copies == batch.copies[1:]
    assert (
        batch.repeat(2).copies == [copy for copy in batch.copies for _ in range(2)] and len(batch.first(2).copies) == 2
    )
