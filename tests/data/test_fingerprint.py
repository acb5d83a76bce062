"""A run goes on with the data it was trained on, or says what differs."""

from __future__ import annotations

from copy import deepcopy

import pytest

from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.sources import DataError
from tests.data.test_datamodule import batches, data, rows, tokenizer  # noqa: F401

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(6)]
OTHER = [{"prompt": f"task {i}", "answer": str(i)} for i in range(6)]


def resumed(module: PromptDataModule, state: dict, *, accept: bool = False) -> PromptDataModule:
    module.setup("fit")
    module.accept_other_data = accept
    module.load_state_dict(state)
    return module


@pytest.fixture
def state(tokenizer):  # noqa: F811
    """State of a run over six prompts in batches of four, after two of five batches."""
    module = data(tokenizer, ROWS)
    module.setup("fit")
    return module.state_dict() | {"consumed": 2}


CHANGES = {
    "prompts": (OTHER, {}, "other rows, though as many (6)"),
    "answers": ([row | {"answer": "9"} for row in ROWS], {}, "other rows, though as many (6)"),
    "order": (ROWS[::-1], {}, "the same rows in another order"),
    "count": (ROWS[:5], {}, "6 training prompts then, 5 now"),
    "shuffle": (ROWS, {"shuffle": False}, "data.shuffle was true, is false"),
    "seed": (ROWS, {"seed": 8}, "the seed of the order was 1, is 8"),
}


@pytest.mark.parametrize(("given", "settings", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_other_data_of_the_same_size_is_refused_with_what_differs(tokenizer, state, given, settings, said):  # noqa: F811
    with pytest.raises(DataError) as caught:
        resumed(data(tokenizer, given, **settings), state)
    assert said in str(caught.value) and "resume_on_other_data=true" in str(caught.value)


# --- what makes tokens of the rows ------------------------------------------------------------------------------------

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TAGGED = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
DATED = "{{ strftime_now('%f') }}" + PLAIN
"""With microseconds in place of the day, so that two renderings differ in one test."""


def changed(tokenizer, template=PLAIN, *, text=False, words=(), eos=None, **settings):  # noqa: F811
    """Data of chat prompts (or of text), with a copy of the tokenizer that differs as asked."""
    copy = deepcopy(tokenizer)
    copy.chat_template = template
    copy.add_tokens(list(words))
    if eos is not None:
        copy.eos_token = eos
    return data(copy, ROWS, text_as_chat=not text, **settings)


RENDERINGS = {
    "template": ({"template": TAGGED}, "other data: another chat template (its text, "),
    "system prompt": ({"system_prompt": "be brief"}, "other data: another chat template (its text, data.system_prompt"),
    "arguments": ({"chat_template_kwargs": {"x": 1}}, "or data.chat_template_kwargs)"),
    "vocabulary": ({"words": ["<new>"]}, "other data: another tokenizer (its vocabulary or its special tokens)"),
    "end token": ({"eos": "z"}, "other data: another tokenizer"),
}


@pytest.mark.parametrize(("change", "said"), RENDERINGS.values(), ids=RENDERINGS.keys())
def test_another_template_or_tokenizer_is_other_data(tokenizer, change, said):  # noqa: F811
    first = changed(tokenizer)
    first.setup("fit")
    state = first.state_dict() | {"consumed": 2}
    resumed(changed(tokenizer), state)
    with pytest.raises(DataError) as caught:
        resumed(changed(tokenizer, **change), state)
    assert said in str(caught.value) and "resume_on_other_data=true" in str(caught.value)
    assert resumed(changed(tokenizer, **change), state, accept=True).state_dict()["origin"] == [2, 0]


def test_a_template_that_writes_the_date_is_the_same_on_another_day(tokenizer):  # noqa: F811
    first, later = changed(tokenizer, DATED), changed(tokenizer, DATED)
    first.setup("fit")
    resumed(later, first.state_dict() | {"consumed": 2})
    assert first.train_prompts[0].ids != later.train_prompts[0].ids


def test_the_template_does_not_matter_to_text_prompts(tokenizer):  # noqa: F811
    first = changed(tokenizer, text=True)
    first.setup("fit")
    resumed(changed(tokenizer, TAGGED, text=True), first.state_dict() | {"consumed": 2})


def test_a_checkpoint_of_an_earlier_release_knows_no_template(tokenizer):  # noqa: F811
    first = changed(tokenizer)
    first.setup("fit")
    state = first.state_dict() | {"consumed": 2}
    state["data"] = {name: value for name, value in state["data"].items() if name != "rendering"}
    assert resumed(changed(tokenizer, TAGGED), state).state_dict()["origin"] == [0, 0]


def test_accepted_data_begins_with_its_first_batch_and_goes_on_so(tokenizer, state):  # noqa: F811
    fresh = [batch.texts for batch in batches(data(tokenizer, OTHER))]
    module = resumed(data(tokenizer, OTHER), state, accept=True)
    assert [batch.texts for batch in module.train_dataloader()] == fresh[:3], "batches 3 to 5 of the run"
    later = resumed(data(tokenizer, OTHER), module.state_dict() | {"consumed": 4})
    assert [batch.texts for batch in later.train_dataloader()] == fresh[2:3], "a second resume needs no key"


def test_another_batch_size_goes_on_at_the_same_prompt(tokenizer, state):  # noqa: F811
    """After two batches of four, the next two batches of three are the prompts 8 to 13 of the stream."""
    one_by_one = data(tokenizer, ROWS, prompts_per_iteration=1, iterations=14)
    single = [text for batch in batches(one_by_one) for text in batch.texts]
    module = resumed(data(tokenizer, ROWS, prompts_per_iteration=3, iterations=4), state)
    assert [text for batch in module.train_dataloader() for text in batch.texts] == single[8:14]


def test_where_the_rows_lie_does_not_matter(tokenizer, state, tmp_path):  # noqa: F811
    import json

    file = tmp_path / "moved.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    resumed(data(tokenizer, str(file)), state)


HELD_OUT = {
    "one row fewer": (OTHER[:5], "data.validation: 6 held-out prompts then, 5 now; eval/* from here on"),
    "another answer": ([*OTHER[:5], OTHER[5] | {"answer": "9"}], "other held-out rows, though as many (6); eval/*"),
    "none": (None, "6 held-out prompts then, 0 now"),
    "another order": (OTHER[::-1], ""),
    "the same": (OTHER, ""),
}


@pytest.mark.parametrize(("given", "said"), HELD_OUT.values(), ids=HELD_OUT.keys())
def test_other_held_out_prompts_are_said_in_one_line_and_training_goes_on(tokenizer, caplog, given, said):  # noqa: F811
    module = data(tokenizer, ROWS, OTHER)
    module.setup("fit")
    state = module.state_dict() | {"consumed": 2}
    expected = [batch.texts for batch in resumed(data(tokenizer, ROWS, OTHER), state).train_dataloader()]
    caplog.clear()
    again = resumed(data(tokenizer, ROWS, given), state)
    assert [batch.texts for batch in again.train_dataloader()] == expected
    assert len(caplog.records) == bool(said)
    assert said in caplog.text
