"""A tiny random language model with a character tokenizer, built in memory: no download, no files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_rlhf.bounds import bounded
from lightning_rlhf.functional.choices import DType
from lightning_rlhf.models.loading import DTYPES, LoadedModel, isolated_rng

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
_PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tiny(
    vocabulary: str | Sequence[str],
    *,
    hidden_size: int = 96,
    intermediate_size: int | None = None,
    layers: int = 2,
    heads: int = 3,
    key_value_heads: int | None = None,
    max_positions: int = 64,
    tie_embeddings: bool = False,
    add_bos: bool = False,
    seed: int = 1,
    dtype: DType = "float32",
) -> LoadedModel:
    """A randomly initialised Llama, the same for the same arguments, and a tokenizer with one token per character.

    Args:
        vocabulary: The characters the tokenizer knows. It refuses a text with any other character.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers; ``None``: four times ``hidden_size``.
        layers: Number of transformer blocks.
        heads: Attention heads, a divisor of ``hidden_size``.
        key_value_heads: Key-value heads, a divisor of ``heads``; ``None``: as many as heads.
        max_positions: Longest sequence, in tokens.
        tie_embeddings: Use the input embedding as the output head.
        add_bos: Begin every encoded text with a start token.
        seed: Seed of the initial weights.
        dtype: ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        ValueError: A number does not fit, or the vocabulary is not made of different single characters.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model dtype = {dtype!r} is not allowed: one of {', '.join(DTYPES)}")
    bounded("model.source", at_least=1, whole=True, hidden_size=hidden_size, layers=layers, max_positions=max_positions)
    key_value_heads = heads if key_value_heads is None else key_value_heads
    if heads < 1 or hidden_size % heads or (hidden_size // heads) % 2:
        raise ValueError(f"model heads = {heads} must divide hidden_size = {hidden_size} into even head sizes")
    if key_value_heads < 1 or heads % key_value_heads:
        raise ValueError(f"model key_value_heads = {key_value_heads} must divide heads = {heads}")
    tokenizer = character_tokenizer(vocabulary, max_positions=max_positions, add_bos=add_bos)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with isolated_rng(seed), torch.device("cpu"):
        lm = LlamaForCausalLM(config)
    if dtype != "float32":
        _convert(lm, DTYPES[dtype])
    return LoadedModel(lm, tokenizer, source=f"tiny-llama-{layers}x{hidden_size}-vocab{len(tokenizer)}-seed{seed}")


def _convert(lm: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Convert the parameters; rotary frequencies are buffers and stay in float32, as ``from_pretrained`` keeps them."""
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(dtype)
    lm.config.dtype = dtype


def character_tokenizer(
    vocabulary: str | Sequence[str], *, max_positions: int = 512, add_bos: bool = False
) -> PreTrainedTokenizerBase:
    """A tokenizer with one token per character, whose ``decode`` is the inverse of its ``encode``.

    Ids: padding 0, end 1, start 2 if ``add_bos``, then the characters in the order given.
    """
    if not isinstance(vocabulary, Sequence):
        raise ValueError(f"model vocabulary = {vocabulary!r} is not allowed: a text or list of different characters")
    characters = list(vocabulary)
    wrong = [entry for entry in characters if len(entry) != 1]
    repeated = sorted({entry for entry in characters if characters.count(entry) > 1})
    if not characters or wrong or repeated:
        reason = f"not single characters: {wrong}" if wrong else f"more than once: {repeated}" if repeated else "empty"
        raise ValueError(f"model vocabulary must be a text or list of different characters; {reason}")
    specials = [PAD, EOS, *([BOS] if add_bos else [])]
    ids = {token: index for index, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS if add_bos else None,
        chat_template=_PLAIN_CHAT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
