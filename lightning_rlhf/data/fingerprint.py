"""Fingerprints of the data of a checkpoint: the training prompts and their order, and the held-out prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rlhf.data.prompts import Prompt


def fingerprint(prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> dict[str, Any]:
    """Plain values that differ if another run would draw other prompts.

    Rows are hashed with all columns, answers included, except those that begin with ``_`` (the row's place of origin).

    Args:
        prompts: the training prompts, in the data's order.
        seed: of the order.
        shuffle: whether each pass has its own order.
    """
    rows = [_digest(prompt) for prompt in prompts]
    return {
        "prompts": len(rows),
        "rows": _joined(sorted(rows)),
        "order": _joined(rows),
        "shuffle": shuffle,
        "seed": seed if shuffle else None,
        "conservative": {prompt.key: prompt.kl_scale for prompt in prompts if prompt.kl_scale not in (None, 1.0)},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, in words; empty if there is none."""
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
    return found


def held_out(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Plain values that differ if the held-out prompts differ; their order does not matter."""
    return {"prompts": len(prompts), "rows": _joined(sorted(_digest(prompt) for prompt in prompts))}


def held_out_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The difference between two sets of held-out prompts, in words; empty if they are the same."""
    if before["prompts"] != now["prompts"]:
        return f"{before['prompts']} held-out prompts then, {now['prompts']} now"
    return f"other held-out rows, though as many ({now['prompts']})" if before["rows"] != now["rows"] else ""


def _digest(prompt: Prompt) -> bytes:
    row = {name: value for name, value in prompt.row.items() if not name.startswith("_")}
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _joined(parts: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
