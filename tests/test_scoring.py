"""The input of rewards: the text as the model wrote it, and the text without special tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.experience import Finish, PromptBatch, Rollout, prompt_key
from lightning_rlhf.models import build_tiny
from lightning_rlhf.rewards import CompositeReward, ExactMatch, RegexMatch, RewardBatch
from lightning_rlhf.rollout.binding import end_tokens
from lightning_rlhf.scoring import as_written, score_rewards

SPECIAL = ["<pad>", "<eos>", "<turn>", "<think>", "</think>"]
PAD, EOS, TURN, THINK, ENDED = range(len(SPECIAL))


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of characters and special tokens, including the tags of reasoning."""
    ids = {token: number for number, token in enumerate([*SPECIAL, *"0123456789+= xyz!,."])}
    core = Tokenizer(models.WordLevel(ids))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tags = {"additional_special_tokens": SPECIAL[TURN:]}
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", **tags, **options)


def ids(core: PreTrainedTokenizerFast, text: str) -> list[int]:
    encoded: list[int] = core(text, add_special_tokens=False)["input_ids"]
    return encoded


def rollout(responses: list[list[int]]) -> tuple[PromptBatch, Rollout]:
    """One prompt with one response per given row."""
    width = max(map(len, responses))
    rows = len(responses)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in responses]).bool()
    key = prompt_key("46=")
    zeros = torch.zeros(rows, dtype=torch.int64)
    drawn = Rollout(
        prompt_ids=torch.ones(rows, 1, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_ids=torch.tensor([row + [0] * (width - len(row)) for row in responses]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(rows, width),
        finish=torch.full((rows,), int(Finish.NATURAL)),
        policy_version=zeros,
        seed=zeros,
        group=zeros,
        prompt_key=[key] * rows,
    )
    return PromptBatch([[1]], ["46="], [key], [{"answer": "46", "_source": "a.jsonl:1"}], [0]), drawn


def test_rewards_read_special_tokens_that_the_model_wrote():
    """With ``<think>1</think>46<eos>`` a reward once read 146, and a pattern for the format found nothing."""
    seen: list[RewardBatch] = []

    def look(batch: RewardBatch) -> list[float]:
        seen.append(batch)
        return [0.0] * len(batch)

    core = tokenizer()
    terms: dict[str, Any] = {
        "format": RegexMatch(r"<think>.*</think>\d+", mode="fullmatch"),
        "answer": RegexMatch(r"</think>(.*)", group=1),
        "look": look,
    }
    prompts, drawn = rollout([[*ids(core, "<think>1</think>46"), EOS]])
    experience = score_rewards(CompositeReward({n: {"reward": r} for n, r in terms.items()}), core, prompts, drawn)
    assert seen[0].responses == experience.texts == ["<think>1</think>46"]
    assert seen[0].plain_responses == ["146"]
    assert seen[0].response_ids == [[*ids(core, "<think>1</think>46"), EOS]]
    assert seen[0].keys == prompts.keys
    assert {name: value.tolist() for name, value in experience.components.items()} == {
        "format": [1.0], "answer": [1.0], "look": [0.0],
    }  # fmt: skip


def test_spaces_stay_as_they_are_written():
    """With ``clean_up_tokenization_spaces`` it would become ``x!= y, z.``."""
    core = tokenizer(clean_up_tokenization_spaces=True)
    prompts, drawn = rollout([[*ids(core, "x != y , z ."), EOS]])
    seen: list[RewardBatch] = []
    reward = CompositeReward({"exact": {"reward": lambda batch: seen.append(batch) or [0.0]}})  # type: ignore[func-returns-value]
    assert score_rewards(reward, core, prompts, drawn).texts == ["x != y , z ."]
    assert seen[0].plain_responses == [core.decode(ids(core, "x != y , z ."), skip_special_tokens=True)]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["4", "6", "<eos>"], "46"),
        (["4", "6", "<eos>", "<pad>", "<pad>"], "46"),
        (["4", "6"], "46"),
        (["4", "6", "<turn>"], "46"),
        (["4", "<pad>", "6", "<eos>"], "4<pad>6"),
        (["4", "<eos>", "6", "<turn>"], "4<eos>6"),
        (["4", "</think>"], "4</think>"),
        (["<eos>"], ""),
        (["<pad>", "<eos>"], ""),
    ],
)
def test_only_trailing_end_and_padding_tokens_are_removed(tokens, text):
    core = tokenizer()
    rows = [core.convert_tokens_to_ids(tokens), core.convert_tokens_to_ids(["1"])]
    assert as_written(core, rows, {TURN}) == [text, "1"]


def test_every_end_token_of_the_model_is_known():
    loaded = build_tiny("0123456789=")
    loaded.lm.generation_config.eos_token_id = [1, 5]
    assert end_tokens(loaded.lm, loaded.tokenizer) == {1, 5}
    prompts, drawn = rollout([[6, 8, 5], [6, 8, 1]])
    reward = CompositeReward({"exact": {"reward": ExactMatch()}})
    known = end_tokens(loaded.lm, loaded.tokenizer)
    assert score_rewards(reward, loaded.tokenizer, prompts, drawn, known).texts == ["46", "46"]
