"""Fingerprints of a checkpoint's data: training prompts and their order, what renders them, and held-out prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.prompts import Prompt


def fingerprint(prompts: Sequence[Prompt], *, seed: int, shuffle: bool, rendering: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values that differ if another run would draw other prompts.

    Rows are hashed with all columns, answers included, except those that begin with ``_`` (the row's place of origin).

    Args:
        prompts: the training prompts, in the data's order.
        seed: of the order.
        shuffle: whether each pass has its own order.
        rendering: what makes tokens of the rows, see :func:`rendering`.
    """
    rows = [_digest(prompt) for prompt in prompts]
    return {
        "prompts": len(rows),
        "rows": _joined(sorted(rows)),
        "order": _joined(rows),
        "shuffle": shuffle,
        "seed": seed if shuffle else None,
        "conservative": {prompt.key: prompt.kl_scale for prompt in prompts if prompt.kl_scale not in (None, 1.0)},
        "rendering": dict(rendering),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, in words; empty if there is none.

    Checkpoints of earlier releases do not know their template and tokenizer; these are not compared then.
    """
    found = []
    if before["prompts"] != now["prompts"]:
        found.append(f"{before['prompts']} training prompts then, {now['prompts']} now")
    elif before["rows"] != now["rows"]:
        found.append(f"other rows, though as many ({now['prompts']})")
    elif before["order"] != now["order"]:
        found.append("the same rows in another order")
    if before["shuffle"] != now["shuffle"]:
        found.append(f"data.shuffle was {str(before['shuffle']).lower()}, is {str(now['shuffle']).lower()}")
    elif before["seed"] != now["seed"]:
        found.append(f"the seed of the order was {before['seed']}, is {now['seed']}")
    if before.get("conservative", {}) != now["conservative"]:  # absent in checkpoints of earlier releases
        found.append("other prompts in data.conservative, or other factors")
    if "rendering" in before:
        found += _rendering_differences(before["rendering"], now["rendering"])
    return found


def rendering(
    tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None, template_kwargs: Mapping[str, Any], chat: bool
) -> dict[str, Any]:
    """Plain values that differ if another run would make other tokens of the same rows.

    The template's text is hashed and not what it renders: a template that writes today's date still is the same.

    Args:
        tokenizer: of the policy.
        system_prompt: put before chat messages that have none.
        template_kwargs: further arguments of the chat template.
        chat: whether some prompt consists of messages; otherwise no template is used, and none is hashed.
    """
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    special += sorted(set(tokenizer.all_special_tokens))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    template = [tokenizer.chat_template, system_prompt, dict(template_kwargs)] if chat else []
    return {"template": _text_digest(template), "tokenizer": _text_digest([vocabulary, special])}


def _rendering_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    if before["template"] != now["template"]:
        what = "its text, data.system_prompt, data.text_as_chat or data.chat_template_kwargs"
        found.append(f"another chat template ({what})")
    if before["tokenizer"] != now["tokenizer"]:
        found.append("another tokenizer (its vocabulary or its special tokens)")
    return found


def held_out(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Plain values that differ if the held-out prompts differ; their order does not matter."""
    return {"prompts": len(prompts), "rows": _joined(sorted(_digest(prompt) for prompt in prompts))}


def held_out_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The difference between two sets of held-out prompts, in words; empty if they are the same."""
    if before["prompts"] != now["prompts"]:
        return f"{before['prompts']} held-out prompts then, {now['prompts']} now"
    return f"other held-out rows, though as many ({now['prompts']})" if before["rows"] != now["rows"] else ""


# --- several processes -----------------------------------------------------------------------------------------------


def in_short(data: Mapping[str, Any], held_out: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint and that of the held-out prompts as few small values, for the other processes of the run."""
    long = ("shuffle", "seed", "conservative")
    return {
        **{name: value for name, value in data.items() if name not in long},
        "settings": _text_digest([data[name] for name in long]),
        "held_out": dict(held_out),
    }


def difference_of_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """What differs between the data of the processes of a run, in words; empty if all have the same.

    Args:
        ranks: :func:`in_short` of every rank.
    """
    found: dict[str, list[int]] = {}
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            found.setdefault("; ".join(_from_first(ranks[0], other)), []).append(rank)
    return "; ".join(
        f"process{'es' * (len(those) > 1)} {', '.join(map(str, those))}: {what}" for what, those in found.items()
    )


def _from_first(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = []
    if other["prompts"] != first["prompts"]:
        found.append(f"{other['prompts']} training prompts where process 0 has {first['prompts']}")
    elif other["rows"] != first["rows"]:
        found.append(f"other training rows than process 0, though as many ({other['prompts']})")
    elif other["order"] != first["order"]:
        found.append("the training rows in another order than process 0")
    if other["settings"] != first["settings"]:
        found.append("another seed, or other prompts in data.conservative")
    found += _rendering_differences(first["rendering"], other["rendering"])
    if other["held_out"] != first["held_out"]:
        counts = other["held_out"]["prompts"], first["held_out"]["prompts"]
        found.append(f"other held-out prompts ({counts[0]}; process 0 has {counts[1]})")
    return found


def _digest(prompt: Prompt) -> bytes:
    row = {name: value for name, value in prompt.row.items() if not name.startswith("_")}
    return hashlib.blake2b(_text(row), digest_size=16).digest()


def _text_digest(value: Any) -> str:
    return hashlib.blake2b(_text(value), digest_size=16).hexdigest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()


def _joined(parts: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
