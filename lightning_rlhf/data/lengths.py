"""Check that prompts leave room for their responses, before the first one is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_rlhf.data.prompts import Prompt
from lightning_rlhf.data.sources import SOURCE_KEY, DataError, listed


class HasPrompts(Protocol):
    """A data module with prompts to look at."""

    @property
    def train_prompts(self) -> Sequence[Prompt]: ...

    @property
    def validation_prompts(self) -> Sequence[Prompt]: ...


def check_room(data: HasPrompts, max_new_tokens: int, limit: int, limited_by: str) -> None:
    """Refuse prompts that with the longest response would exceed a limit.

    Args:
        data: training and held-out prompts.
        max_new_tokens: longest response.
        limit: tokens of prompt and response together.
        limited_by: the source of the limit, in words.

    Raises:
        DataError: names the rows, and the two keys that make room.
    """
    most = limit - max_new_tokens
    if most < 1:
        raise DataError(
            f"rollout.max_new_tokens = {max_new_tokens} is not allowed: no room is left for a prompt in {limit} tokens "
            f"({limited_by})"
        )
    for name, prompts in (("train", data.train_prompts), ("validation", data.validation_prompts)):
        long = [prompt for prompt in prompts if len(prompt.ids) > most]
        if not long:
            continue
        longest = max(len(prompt.ids) for prompt in long)
        rows = listed([f"{prompt.row.get(SOURCE_KEY)} ({len(prompt.ids)} tokens)" for prompt in long])
        room = f"; rollout.max_new_tokens={limit - longest} makes room for them" if longest < limit else ""
        raise DataError(
            f"data.{name}: {len(long)} of {len(prompts)} prompts and rollout.max_new_tokens = {max_new_tokens} need "
            f"more than {limit} tokens ({limited_by}): {rows}. data.max_prompt_tokens={most} leaves such prompts "
            f"out{room}"
        )
