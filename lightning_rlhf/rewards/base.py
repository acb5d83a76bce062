"""What a reward is: anything that takes a :class:`RewardBatch` and gives one number per response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_rlhf.experience import Finish, prompt_key

SOURCE_KEY = "_source"
"""Key under which a data row says where it came from."""

MESSAGES_KEY = "_messages"
"""Key under which the row of a chat prompt holds its messages."""


class RewardError(ValueError):
    """A reward that cannot be used. The message names the term, the row and the value."""


@dataclass
class RewardBatch:
    """What a reward sees of ``B`` responses.

    Attributes:
        prompts: the prompts as the policy read them (chat template applied).
        responses: the responses as text, without special tokens.
        response_ids: the policy's own token ids of each response, end token included.
        rows: the data row of each prompt, with all its columns, its place of origin under ``_source`` and, for a
            chat prompt, the messages under ``_messages``.
        finish: how each response ended.
    """

    prompts: list[str]
    responses: list[str]
    response_ids: list[list[int]]
    rows: list[dict[str, Any]]
    finish: list[Finish]

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in vars(self).items()}
        if len(set(lengths.values())) > 1:
            raise RewardError(f"the fields of a RewardBatch must have one length, not {lengths}")

    def __len__(self) -> int:
        return len(self.responses)


@runtime_checkable
class Reward(Protocol):
    """A function, or an object with ``__call__``.

    It may also have ``check_row(row)``, called on every data row before training, which raises :class:`RewardError`
    for a row it could not score, and ``to(device)``.
    """

    def __call__(self, batch: RewardBatch) -> Sequence[float] | Tensor:
        """One finite number per response, ``[B]``."""
        ...


def evaluate(name: str, reward: Reward, batch: RewardBatch) -> Tensor:
    """The reward's numbers, checked: ``[B]`` float32 on the CPU.

    Args:
        name: of the term, for error messages.
        reward: the term.
        batch: ``B`` responses.

    Raises:
        RewardError: not one finite number per response.
    """
    result = reward(batch)
    if isinstance(result, Tensor):
        if result.ndim != 1:
            raise RewardError(f"reward term {name!r}: a tensor of shape [{len(batch)}] is wanted, not {result.shape}")
        result = result.tolist()
    try:
        count = len(result)
    except TypeError:
        raise RewardError(
            f"reward term {name!r}: a sequence of {len(batch)} numbers is wanted, not {result!r:.80}"
        ) from None
    if count != len(batch):
        raise RewardError(f"reward term {name!r}: {count} numbers for {len(batch)} responses")
    for i, value in enumerate(result):
        if not _is_finite(value):
            raise RewardError(f"reward term {name!r}: {value!r} is not a finite number, for {describe(batch, i)}")
    return torch.tensor([float(value) for value in result], dtype=torch.float32)


def describe(batch: RewardBatch, i: int) -> str:
    """Row ``i`` in words: place of origin, prompt key, and the beginnings of prompt and response."""
    return (
        f"row {i} of the batch ({place(batch.rows[i])}, prompt key {prompt_key(batch.prompts[i])}): "
        f"prompt {batch.prompts[i][:60]!r}, response {batch.responses[i][:60]!r}"
    )


def place(row: Mapping[str, Any]) -> str:
    """Where a data row came from."""
    return str(row.get(SOURCE_KEY, "a row of unknown origin"))


def _is_finite(value: Any) -> bool:
    """Whether the value is a number that float32 can hold."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and abs(number) <= torch.finfo(torch.float32).max
