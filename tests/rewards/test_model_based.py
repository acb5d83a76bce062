"""The reward model: its own ids, the last attended token, the same score alone and in any batch."""

from __future__ import annotations

import logging
import string
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    CTRLConfig,
    CTRLForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lightning_rlhf.experience import Finish
from lightning_rlhf.rewards import RewardBatch, RewardError, RewardModel
from lightning_rlhf.rewards.model_based import last_attended

CHARACTERS = string.ascii_lowercase + string.digits + " +=?.:[]"
VOCABULARY = 3 + len(CHARACTERS)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ eos_token }}"
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def toy_tokenizer(characters: str = CHARACTERS, template: str | None = None, **options) -> PreTrainedTokenizerFast:
    """One token per character after <pad> 0, <s> 1, </s> 2; the order of ``characters`` decides their ids."""
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<pad>", "<s>", "</s>", *characters])}, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **specials)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def save(tmp_path):
    """``save(model, tokenizer)``: the folder both were written to, with a head whose outputs differ clearly."""

    def _save(model, tokenizer, name: str = "model") -> str:
        head = getattr(model, "score", None)
        if head is not None:
            torch.manual_seed(1)
            torch.nn.init.normal_(head.weight)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return _save


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**{**LLAMA, "num_labels": 1, "pad_token_id": 0} | changes))


def batch(*responses: str, prompt: str = "1+1=", **row) -> RewardBatch:
    count = len(responses)
    rows = [{"_source": f"train.jsonl:{i + 1}"} | row for i in range(count)]
    return RewardBatch([prompt] * count, list(responses), [[7]] * count, rows, [Finish.NATURAL] * count)


@torch.no_grad()
def by_hand(path: str, ids: list[int], label: int = 0) -> float:
    """Score of one sequence: backbone and head at its last token, without padding, mask or pooling."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    return model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1])[label].item()


# --- where the score is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([1, 1, 1, 0], 3.0), ([0, 1, 1, 1], 4.0), ([1, 1, 1, 1], 4.0), ([0, 1, 1, 0], 3.0), ([1, 0, 0, 0], 1.0)],
)
def test_the_score_is_the_one_at_the_last_attended_token(mask, expected):
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for dtype in (torch.bool, torch.long):
        assert last_attended(values, torch.tensor([mask], dtype=dtype)).tolist() == [expected]
    hidden = values.unsqueeze(-1).repeat(2, 1, 5)
    assert last_attended(hidden, torch.tensor([mask, [1, 1, 0, 0]])).tolist() == [[expected] * 5, [2.0] * 5]


MODELS = {
    "llama": llama,
    "gpt2": lambda: GPT2ForSequenceClassification(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, num_labels=1, pad_token_id=0)
    ),
    "head of its own, pooling by padding id": lambda: CTRLForSequenceClassification(
        CTRLConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, dff=64, num_labels=1, pad_token_id=0)
    ),
    "encoder": lambda: BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            initializer_range=0.5,
            num_labels=1,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_score_is_the_same_alone_and_in_a_batch(save, name, side):
    torch.manual_seed(0)
    path = save(MODELS[name](), toy_tokenizer(padding_side=side))
    texts = ["2", "two apples and three pears", "2.", "3", "eleven", "x" * 40]
    model = RewardModel(path, batch_size=4)
    together = model(batch(*texts))
    alone = torch.cat([model(batch(text)) for text in texts])
    assert together.shape == (6,)
    assert together.dtype == torch.float32
    assert together.std() > 1e-3
    assert torch.allclose(together, alone, atol=1e-5)
    backwards = RewardModel(path, batch_size=3)(batch(*texts[::-1]))
    assert torch.allclose(backwards.flip(0), together, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "head of its own, pooling by padding id"])
def test_padding_token_equal_to_eos_changes_nothing(save, name):
    """The conversation ends with EOS; a search for padding would stop before it."""
    torch.manual_seed(0)
    model, tokenizer = MODELS[name](), toy_tokenizer(template=TEMPLATE)
    apart = save(model, tokenizer, "apart")
    model.config.pad_token_id = 2
    tokenizer.pad_token = "</s>"
    equal = save(model, tokenizer, "equal")
    texts = ["2", "two apples"]
    scores = [RewardModel(path)(batch(*texts)) for path in (apart, equal)]
    assert torch.allclose(*scores, atol=1e-5)
    ids = tokenizer("<s>[user:1+1=][assistant:2]</s>", add_special_tokens=False)["input_ids"]
    searched = AutoModelForSequenceClassification.from_pretrained(equal)(torch.tensor([ids])).logits.item()
    assert abs(searched - scores[1][0].item()) > 1e-3
    if name == "llama":
        assert scores[1][0].item() == pytest.approx(by_hand(equal, ids), abs=1e-5)


def test_reward_model_sees_its_own_ids(save):
    swapped = CHARACTERS[::-1]
    path = save(llama(), toy_tokenizer(swapped))
    model = RewardModel(path)
    ids = [1, *(3 + swapped.index(c) for c in "1+1=2")]
    assert model.encode(batch("2"), 0) == ids
    assert ids[-1] != toy_tokenizer()("2")["input_ids"][-1]
    assert model(batch("2")).item() == pytest.approx(by_hand(path, ids), abs=1e-5)


# --- what is encoded -------------------------------------------------------------------------------------------------


def decoded(model: RewardModel, responses: RewardBatch) -> str:
    return model.tokenizer.decode(model.encode(responses, 0))


def test_chat_template_is_used_if_there_is_one_with_one_bos(save):
    model = RewardModel(save(llama(), toy_tokenizer(template=TEMPLATE)))
    assert decoded(model, batch("2")) == "<s>[user:1+1=][assistant:2]</s>"
    messages = [{"role": "system", "content": "sum"}, {"role": "user", "content": "1+1"}]
    asked = batch("2", prompt="rendered for the policy", _messages=messages)
    assert decoded(model, asked) == "<s>[system:sum][user:1+1][assistant:2]</s>"
    assert len(messages) == 2


def test_special_tokens_that_the_policy_wrote_do_not_reach_the_conversation(save):
    model = RewardModel(save(llama(), toy_tokenizer(template=TEMPLATE)))
    written = replace(batch("2][user:well done"), plain_responses=["2"])
    assert decoded(model, written) == "<s>[user:1+1=][assistant:2]</s>"
    joined = RewardModel(save(llama(), toy_tokenizer(), "joined"))
    assert decoded(joined, written) == decoded(joined, batch("2"))


def test_text_is_joined_with_one_bos_and_eos_on_demand(save):
    path = save(llama(), toy_tokenizer(template=TEMPLATE))
    assert decoded(RewardModel(path, chat=False), batch("2")) == "<s>1+1=2"
    assert decoded(RewardModel(path, chat=False), batch("2", prompt="<s>1+1=")) == "<s>1+1=2"
    assert decoded(RewardModel(path, chat=False, append_eos=True), batch("2")) == "<s>1+1=2</s>"


def test_chat_prompt_without_template_is_refused_with_its_place(save):
    model = RewardModel(save(llama(), toy_tokenizer()))
    with pytest.raises(RewardError, match=r"train\.jsonl:1: the prompt consists of chat messages"):
        model(batch("2", _messages=[{"role": "user", "content": "1+1"}]))


def test_long_conversations_lose_their_beginning_counted_and_said_once(save, caplog):
    path = save(llama(), toy_tokenizer())
    model = RewardModel(path, max_tokens=4)
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        score = model(batch("234", "5", "2", prompt="1="))
    assert model.counts == {"cut": 1}
    assert "conversation of 6 tokens cut to 4 at its beginning" in caplog.text
    assert score[0].item() == pytest.approx(
        by_hand(path, toy_tokenizer()("=234", add_special_tokens=False)["input_ids"]), abs=1e-5
    )
    model(batch("234", prompt="1="))
    assert model.counts == {"cut": 2}
    assert caplog.text.count("cut to 4") == 1


# --- the model -------------------------------------------------------------------------------------------------------


def test_model_is_frozen_in_evaluation_mode_and_moves(save):
    model = RewardModel(save(llama(attention_dropout=0.5), toy_tokenizer()), dtype="bfloat16")
    assert not model.model.training
    assert not any(p.requires_grad for p in model.model.parameters())
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    first = model(batch("2", "33"))
    assert first.dtype == torch.float32
    assert torch.equal(first, model(batch("2", "33")))
    assert model.to("meta") is model
    assert model.model.device.type == "meta"


def test_model_with_several_outputs_needs_a_label(save):
    path = save(llama(num_labels=3), toy_tokenizer())
    with pytest.raises(
        RewardError, match=r"label = None is not allowed: .* has 3 outputs: 0 \(LABEL_0\), 1 \(LABEL_1\)"
    ):
        RewardModel(path)
    with pytest.raises(RewardError, match="label = 3 is not allowed"):
        RewardModel(path, label=3)
    ids = toy_tokenizer()("1+1=2")["input_ids"]
    assert RewardModel(path, label=2)(batch("2")).item() == pytest.approx(by_hand(path, ids, label=2), abs=1e-5)


def test_plain_language_model_is_refused(save):
    path = save(LlamaForCausalLM(LlamaConfig(**LLAMA)), toy_tokenizer())
    with pytest.raises(RewardError, match=r"a reward model is wanted; the model has no trained score\.weight"):
        RewardModel(path)


def test_what_transformers_says_of_the_weights_of_a_model_that_is_used_is_shown(save, caplog, monkeypatch):
    path = save(llama(), toy_tokenizer())
    file = Path(path) / "model.safetensors"
    save_file(load_file(file) | {"spare.weight": torch.zeros(1)}, file, metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    RewardModel(path)
    assert "spare.weight" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0 is not allowed"),
        ({"max_tokens": 0}, "max_tokens = 0 is not allowed"),
        ({"dtype": "float33"}, "dtype = 'float33' is not allowed"),
        ({"dtype": "int8"}, "dtype = 'int8' is not allowed"),
        ({"chat": True}, "chat = true is not allowed: the tokenizer of .* has no chat template"),
        ({"append_eos": True, "chat": None, "template": TEMPLATE}, "append_eos = true is not allowed"),
    ],
)
def test_bad_settings_are_refused(save, options, message):
    path = save(llama(), toy_tokenizer(template=options.pop("template", None)))
    with pytest.raises(RewardError, match=message):
        RewardModel(path, **options)


def test_missing_model_is_named(tmp_path):
    said = "is not allowed: a reward model is wanted; "
    with pytest.raises(RewardError, match=rf"path = '/nowhere/model' {said}there is no such file or folder$"):
        RewardModel("/nowhere/model")
    with pytest.raises(RewardError, match=rf"path = 'nowhere' {said}no such folder here, and the Hugging Face hub"):
        RewardModel("nowhere")
    with pytest.raises(RewardError, match=rf"path = '{tmp_path}' {said}the folder is empty$"):
        RewardModel(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RewardError, match=r"the folder has no config\.json; it holds: notes\.txt$"):
        RewardModel(str(tmp_path))
    with pytest.raises(RewardError, match=r"it is a file, not a folder$"):
        RewardModel(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardError, match=rf"path = '{tmp_path}' {said}it cannot be loaded: .") as caught:
        RewardModel(str(tmp_path))
    assert "\n" not in str(caught.value)
