"""Prompts: one BOS, the chat template once, long prompts dropped and not truncated, faulty rows named."""

from __future__ import annotations

import string

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.data.prompts import MESSAGES_KEY, PromptEncoder, collate
from lightning_rlhf.data.sources import SOURCE_KEY, DataError, open_source, read_rows
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.faults import Faults
from lightning_rlhf.models.tiny import character_tokenizer
from lightning_rlhf.rewards import base as rewards_base

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}{% if loud %}!{% endif %}"
)


def toy_tokenizer(single: str = "<s> $A", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character; ``single`` says what is added to plain text. BOS is 1, EOS is 2."""
    tokens = ["<pad>", "<s>", "</s>", *string.printable, "\u00e4"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def row(prompt, **columns):
    return {"prompt": prompt, **columns, SOURCE_KEY: "train.jsonl:7"}


def user(content):
    return [{"role": "user", "content": content}]


def encode_one(encoder: PromptEncoder, value):
    return encoder.encode([row(value)]).prompts[0]


def test_rewards_read_messages_under_the_same_key():
    assert rewards_base.MESSAGES_KEY == MESSAGES_KEY


@pytest.mark.parametrize("prompt", [user("12+34"), "12+34=", "<s>12+34="], ids=["chat", "raw", "raw with BOS in it"])
def test_exactly_one_bos_at_the_beginning(prompt):
    encoded = encode_one(PromptEncoder(toy_tokenizer()), prompt)
    assert encoded.ids.count(1) == 1
    assert encoded.ids[0] == 1


def test_chat_text_is_tokenised_as_rendered():
    tokenizer = toy_tokenizer()
    encoded = encode_one(PromptEncoder(tokenizer), user("hi"))
    assert encoded.text == "<s>[user:hi][assistant:"
    assert encoded.ids == tokenizer(encoded.text, add_special_tokens=False)["input_ids"]


def test_template_without_bos_is_taken_at_its_word():
    tokenizer = toy_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert 1 not in encode_one(PromptEncoder(tokenizer), user("hi")).ids


def test_raw_text_gets_no_bos_from_a_tokenizer_that_adds_none():
    assert 1 not in encode_one(PromptEncoder(toy_tokenizer(single="$A")), "12+34=").ids


def test_raw_prompt_does_not_end_with_the_eos_a_tokenizer_adds():
    encoded = encode_one(PromptEncoder(toy_tokenizer(single="<s> $A </s>")), "12")
    assert (encoded.ids[0], len(encoded.ids)) == (1, 3)
    assert 2 not in encoded.ids


@pytest.mark.parametrize("template", [TEMPLATE, "{% for m in messages %}[{{ m.content }}]{% endfor %}"])
@pytest.mark.parametrize("single", ["<s> $A </s>", "$A"])
@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize("value", [user("12+34"), "12+34=", "<s>12="], ids=["chat", "raw", "raw with BOS in it"])
def test_recorded_prompts_get_the_ids_of_the_rollouts(value, as_chat, single, template):
    """A record has the rendered text and the key, and not whether a template was at work."""
    encoder = PromptEncoder(toy_tokenizer(single, template), text_as_chat=as_chat, max_tokens=30)
    made = encode_one(encoder, value)
    assert encoder.ids_of_recorded([(made.text, made.key), ("9", prompt_key("9"))])[0] == made.ids
    assert encoder.ids_of_recorded([]) == []


def test_a_recorded_prompt_that_the_tokenizer_does_not_know_is_named():
    encoder = PromptEncoder(character_tokenizer("0123"))
    with pytest.raises(DataError, match=rf"{prompt_key('9')}.*'9'"):
        encoder.ids_of_recorded([("9", prompt_key("9"))])


def test_prompt_carries_key_row_and_text():
    encoded = encode_one(PromptEncoder(toy_tokenizer()), "12+34=")
    assert encoded.text == "12+34="
    assert encoded.key == prompt_key("12+34=")
    assert encoded.row == row("12+34=")


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_key_is_that_of_the_rows_content_whatever_template_tokenizer_and_settings_make_of_it():
    keys = set()
    for today in ("1 May", "2 May", "10 May"):
        tokenizer = toy_tokenizer(template="Today is {{ today }}. " + TEMPLATE)
        encoder = PromptEncoder(tokenizer, system_prompt="x", chat_template_kwargs={"today": today})
        keys.add(encode_one(encoder, MESSAGES).key)
    assert keys == {prompt_key(MESSAGES)}
    wrapped = encode_one(PromptEncoder(toy_tokenizer(), text_as_chat=True, system_prompt="be brief"), "hi")
    assert wrapped.key == prompt_key("hi") == prompt_key(user("hi"))


@pytest.mark.parametrize(
    "same",
    [
        [{"content": "be brief", "role": "system"}, {"content": "hi", "role": "user"}],
        [{**message, "name": None, "tool_calls": None} for message in MESSAGES],
        tuple(MESSAGES),
    ],
    ids=["order of keys", "empty columns of Parquet", "tuple"],
)
def test_ways_of_writing_the_same_messages_have_one_key(same):
    assert prompt_key(same) == prompt_key(MESSAGES)


def test_normal_forms_of_unicode_have_one_key_and_other_texts_have_another():
    assert prompt_key("cafe\u0301?") == prompt_key("caf\u00e9?")
    assert prompt_key([*MESSAGES[:1], *user("cafe\u0301?")]) == prompt_key([*MESSAGES[:1], *user("caf\u00e9?")])
    different = ["hi", "hi ", "Hi", "\ud83d", MESSAGES, MESSAGES[:1], MESSAGES[::-1], [*MESSAGES, *user("hi")]]
    assert len({prompt_key(prompt) for prompt in different}) == len(different)


def test_system_prompt_goes_before_the_messages_once():
    encoder = PromptEncoder(toy_tokenizer(), system_prompt="be brief")
    encoded = encode_one(encoder, user("hi"))
    assert encoded.text == "<s>[system:be brief][user:hi][assistant:"
    assert encoded.row[MESSAGES_KEY] == [{"role": "system", "content": "be brief"}, *user("hi")]
    own = [{"role": "system", "content": "sing"}, *user("hi")]
    assert encode_one(encoder, own).text == "<s>[system:sing][user:hi][assistant:"


def test_the_rows_own_messages_are_left_as_they_are():
    messages = user("hi")
    encoded = encode_one(PromptEncoder(toy_tokenizer(), system_prompt="be brief"), messages)
    assert messages == user("hi")
    assert encoded.row["prompt"] is messages


def test_text_as_chat_wraps_text_in_a_user_message():
    encoder = PromptEncoder(toy_tokenizer(), text_as_chat=True, chat_template_kwargs={"loud": True})
    assert encode_one(encoder, "hi").text == "<s>[user:hi][assistant:!"


def test_prompt_field_is_configurable():
    encoder = PromptEncoder(toy_tokenizer(), prompt_field="question")
    assert encoder.encode([{"question": "why", SOURCE_KEY: "x:1"}]).prompts[0].text == "why"


def test_long_prompts_are_dropped_and_counted_never_cut():
    encoder = PromptEncoder(toy_tokenizer(), max_tokens=6)
    encoded = encoder.encode([row("12345"), row("123456"), row("1"), row("1234567")])
    assert [prompt.text for prompt in encoded.prompts] == ["12345", "1"]
    assert [len(prompt.ids) for prompt in encoded.prompts] == [6, 2]
    assert [prompt.text for prompt in encoded.too_long] == ["123456", "1234567"]
    assert encoded.longest == 8


def test_of_a_prompt_of_10_mb_only_a_beginning_is_tokenised(monkeypatch):
    """Tokenising it whole takes a minute with a character-level tokenizer, only to drop it."""
    tokenizer = toy_tokenizer()
    encoder = PromptEncoder(tokenizer, max_tokens=512)
    seen: list[int] = []
    tokenise = type(tokenizer).__call__

    def counting(self, texts, **options):
        seen.append(sum(map(len, [texts] if isinstance(texts, str) else texts)))
        return tokenise(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    encoded = encoder.encode([row("1+2="), row("the cat sat on the mat " * 450_000), row("a" * 513)])
    assert [prompt.text for prompt in encoded.prompts] == ["1+2="] and len(encoded.too_long) == 2
    assert len(encoded.too_long[0].text) == 10_350_000, "the prompt itself is not cut"
    assert sum(seen) < 20_000 and encoder.counted_in_part and encoded.longest == 16 * 512 + 1  # with its BOS


def test_a_long_text_of_few_tokens_is_kept():
    """A tokenizer that takes a run of blanks, or an unknown word, as one token."""
    core = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    encoder = PromptEncoder(tokenizer, max_tokens=8)
    [prompt] = encoder.encode([row("a" + " " * 100_000 + "a")]).prompts
    assert prompt.ids == [2, 2] and not encoder.counted_in_part


def test_more_rows_than_one_tokenizer_call_keep_their_order():
    texts = [str(i) for i in range(2100)]
    assert [p.text for p in PromptEncoder(toy_tokenizer()).encode(map(row, texts)).prompts] == texts


def test_all_prompts_too_long_is_an_error_with_limit_count_and_shortest():
    encoder = PromptEncoder(toy_tokenizer(), max_tokens=4)
    with pytest.raises(DataError) as error:
        encoder.encode([row("123456"), row("1234")])
    assert str(error.value) == (
        "all 2 prompts are longer than data.max_prompt_tokens = 4; the shortest has 5 tokens. "
        "Raise the limit or shorten the prompts"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"train\.jsonl:7: no prompt: 'prompt' is null \(columns: answer, prompt\)"),
        ("  \n", r"train\.jsonl:7: the prompt is empty"),
        ([], r"train\.jsonl:7: the prompt is empty"),
        (user(" "), r"train\.jsonl:7: the prompt is empty"),
        (17, r"train\.jsonl:7: 'prompt' must be text or a list of messages .* not 17"),
        (["hi"], r"train\.jsonl:7: 'prompt' must be text or a list of messages"),
        ([{"role": "user"}], r"train\.jsonl:7: message 0 has no text under 'content'"),
        ([*user("a"), {"content": "b"}], r"train\.jsonl:7: message 1 has no text under 'role'"),
        ([*user("a"), {"role": "assistant", "content": "b"}], r"train\.jsonl:7: the prompt ends with an assistant"),
    ],
)
def test_faulty_rows_are_named_with_their_place(value, message):
    with pytest.raises(DataError, match=message):
        PromptEncoder(toy_tokenizer()).encode([row(value, answer="1")])


def test_row_without_the_column_names_the_columns_there_are():
    with pytest.raises(DataError, match=r"a:3: no prompt: the row has no 'prompt' \(columns: answer, question\)"):
        PromptEncoder(toy_tokenizer()).encode([{"question": "x", "answer": "y", SOURCE_KEY: "a:3"}])


def test_chat_needs_a_template_and_a_system_prompt_needs_chat():
    with pytest.raises(DataError, match=r"train\.jsonl:7: .* the model's tokenizer has no chat template"):
        encode_one(PromptEncoder(toy_tokenizer(template=None)), user("hi"))
    with pytest.raises(DataError, match=r"data\.system_prompt is set, but the prompt is plain text"):
        encode_one(PromptEncoder(toy_tokenizer(), system_prompt="be brief"), "hi")


REFUSING = "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        (REFUSING, MESSAGES, "train.jsonl:7: the chat template refuses the messages: roles must alternate"),
        ("{{ none.x.y }}", MESSAGES, "train.jsonl:7: the chat template refuses the messages: UndefinedError: "),
        ("{{ 'a' + 1 }}", MESSAGES, "train.jsonl:7: the chat template refuses the messages: TypeError: "),
        (TEMPLATE, user("ab\ud83d"), "train.jsonl:7: the prompt is no valid Unicode: character 12 is '\\ud83d'"),
        (TEMPLATE, "ab\ud83d", "train.jsonl:7: the prompt is no valid Unicode: character 3 is '\\ud83d', half of a"),
    ],
)
def test_rows_that_template_or_unicode_refuse_are_named(template, value, message):
    with pytest.raises(DataError) as error:
        PromptEncoder(toy_tokenizer(template=template)).encode([{"prompt": "ok", SOURCE_KEY: "a"}, row(value)])
    assert str(error.value).startswith(message)


def test_a_row_that_the_tokenizer_refuses_is_named_among_others():
    tokens = {"a": 0, "b": 1, "bb": 2}  # pieces of text: which characters they cannot make up is not known
    core = Tokenizer(models.WordLevel(tokens, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rows = [{"prompt": text, SOURCE_KEY: f"train.jsonl:{line}"} for line, text in enumerate(["ab", "b", "ac"], start=1)]
    with pytest.raises(DataError, match=r"train\.jsonl:3: the tokenizer refuses the prompt 'ac': .*WordLevel"):
        PromptEncoder(PreTrainedTokenizerFast(tokenizer_object=core)).encode(rows)


def test_all_rows_at_fault_are_named_in_their_order_whatever_the_fault(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "ok"}\n{"prompt": " "}\n{"prompt": 1\n{"question": "x"}\n{"prompt": "ok"}\n[]\n')
    faults = Faults()
    with pytest.raises(DataError) as error:
        PromptEncoder(toy_tokenizer()).encode(read_rows(open_source(path), faults), faults)
    first, *lines = str(error.value).splitlines()
    assert first == "4 rows cannot be used:"
    reasons = ("the prompt is empty", "not valid JSON", "no prompt: the row has", "a line must hold one JSON object")
    for line, number, reason in zip(lines, (2, 3, 4, 6), reasons, strict=True):
        assert line.startswith(f"  {path}:{number}: {reason}")


def test_all_rows_that_the_tokenizer_refuses_are_named():
    rows = [{"prompt": text, SOURCE_KEY: f"a:{line}"} for line, text in enumerate(("1", "x", "2", "y+"), start=1)]
    with pytest.raises(DataError, match=r"^2 rows .*\n  a:2: the model has no token for 'x'.*\n  a:4: .* for 'y'"):
        PromptEncoder(character_tokenizer("12+")).encode(rows)


def test_no_rows_and_a_limit_below_one_are_refused():
    with pytest.raises(DataError, match="there is no row"):
        PromptEncoder(toy_tokenizer()).encode([])
    with pytest.raises(SettingError, match=r"data\.max_prompt_tokens = 0 is not allowed"):
        PromptEncoder(toy_tokenizer(), max_tokens=0)


def test_prompt_without_a_token_is_refused():
    tokenizer = toy_tokenizer(single="$A", template="")
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("z", "")
    with pytest.raises(DataError, match=r"train\.jsonl:7: the tokenizer makes no token of the prompt 'z'"):
        encode_one(PromptEncoder(tokenizer), "z")


def test_collate_keeps_all_fields_side_by_side():
    prompts = PromptEncoder(toy_tokenizer()).encode([row("1"), row("22")]).prompts
    batch = collate(prompts, [0, 1])
    assert len(batch) == 2
    assert batch.ids == [prompt.ids for prompt in prompts]
    assert (batch.texts, batch.keys, batch.passes) == (["1", "22"], [prompt_key("1"), prompt_key("22")], [0, 1])
    assert batch.rows[0] is prompts[0].row


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}]},
            r"; 'messages' holds messages: data\.prompt_field=messages$",
        ),
        ({"tags": ["a"], "docs": [{"title": "x"}], "messages": []}, r"\(columns: answer, docs, messages, tags\)$"),
    ],
)
def test_a_column_of_messages_is_suggested(columns, said):
    with pytest.raises(DataError, match=said):
        PromptEncoder(toy_tokenizer()).render({SOURCE_KEY: "a:3", "answer": "1", **columns})


def test_the_column_that_the_kit_uses_for_messages_is_refused() -> None:
    faults = Faults()
    rows = [{"prompt": "1+2=", "_messages": "x", SOURCE_KEY: "rows.jsonl:1"}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: the column '_messages' is used by the kit; rename it"):
        PromptEncoder(toy_tokenizer()).encode(rows, faults)
