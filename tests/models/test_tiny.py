from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.models.loading import load_pretrained
from lightning_rlhf.models.tiny import build_tiny, character_tokenizer

VOCABULARY = "0123456789+-*= \né<>eos"


@pytest.mark.parametrize("add_bos", [False, True])
def test_decode_is_the_inverse_of_encode(add_bos: bool) -> None:
    tokenizer = character_tokenizer(VOCABULARY, add_bos=add_bos)
    start = [tokenizer.bos_token_id] if add_bos else []
    for text in ["12 + 3 = 15\n", " 1", "  ", "é=é", "\n\n", "+", "<eo>", "5 ", "0-1*2"]:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) + add_bos
        assert ids[: len(start)] == start
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids[len(start) :]
        assert tokenizer.decode(ids[len(start) :]) == text
    assert tokenizer.decode([*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]) == "12<eos>"


def test_special_tokens() -> None:
    tokenizer = character_tokenizer("01")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert len(tokenizer) == 4
    assert character_tokenizer("01", add_bos=True).bos_token_id == 2
    messages = [{"role": "user", "content": "0+1="}]
    assert character_tokenizer("01+=").apply_chat_template(messages, tokenize=False) == "0+1="


def test_unknown_characters_are_refused_and_not_replaced() -> None:
    with pytest.raises(Exception, match="Missing \\[UNK\\] token"):
        character_tokenizer("01").encode("0a1")


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [("", "empty"), ("0110", r"more than once: \['0', '1'\]"), (["0", "10"], r"not single characters: \['10'\]")],
)
def test_vocabulary_is_checked(vocabulary: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"model vocabulary .*{reason}"):
        build_tiny(vocabulary)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "model heads = 3 must divide hidden_size = 32"),
        ({"hidden_size": 36, "heads": 4}, "even head sizes"),
        ({"heads": 4, "key_value_heads": 3}, "model key_value_heads = 3 must divide heads = 4"),
        ({"dtype": "fp32"}, "model dtype = 'fp32' is not allowed: one of float32, bfloat16, float16"),
    ],
)
def test_numbers_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny("01", **{"hidden_size": 32, "layers": 1} | settings)


def test_every_number_reaches_the_model() -> None:
    lm = build_tiny(
        "0123",
        hidden_size=32,
        intermediate_size=40,
        layers=3,
        heads=4,
        key_value_heads=2,
        max_positions=77,
        tie_embeddings=True,
    ).lm
    config = lm.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 40, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (4, 2, 77)
    assert config.vocab_size == lm.lm_head.weight.shape[0] == 6
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert (config.eos_token_id, config.pad_token_id, config.attention_dropout) == (1, 0, 0.0)
    assert build_tiny("01", hidden_size=16, layers=1, heads=2).lm.config.intermediate_size == 64


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    def weights(seed: int, **changes: Any) -> list[torch.Tensor]:
        lm = build_tiny("0123", hidden_size=32, layers=2, heads=4, seed=seed, **changes).lm
        return list(lm.state_dict().values())

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights(2), strict=True))
    low = weights(1, dtype="bfloat16")
    assert all(torch.equal(a.to(torch.bfloat16), b) for a, b in zip(first, low, strict=True))


def test_rotary_frequencies_stay_in_float32() -> None:
    lm = build_tiny("01", hidden_size=32, layers=1, heads=2, dtype="bfloat16").lm
    assert lm.dtype == torch.bfloat16
    assert lm.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_again(tmp_path: Path, tied: bool) -> None:
    built = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2, tie_embeddings=tied, add_bos=True)
    built.lm.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(str(tmp_path))
    text = "12 + 3 = 15\né"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = load_pretrained(str(tmp_path))
    for other in (tokenizer, again.tokenizer):
        assert other.encode(text) == built.tokenizer.encode(text)
        assert other.decode(other.encode(text), skip_special_tokens=True) == text
        assert (other.pad_token_id, other.eos_token_id, other.bos_token_id) == (0, 1, 2)
        assert other.chat_template == built.tokenizer.chat_template
    for model in (lm, again.lm):
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in built.lm.state_dict().items())
