"""The data that travels through one iteration: prompts, rollouts, experience, minibatches.

Notation: ``B`` sequences, ``P`` prompt columns, ``R`` response columns, ``T = P + R``. Prompts are padded on the
left, responses on the right, so column ``P`` is the first response token of every row. Column ``t`` of every
``[B, R]`` tensor speaks of response token ``t``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_rlhf.functional.losses import TOKEN_MEAN, LossScale


class Finish(IntEnum):
    """Why a response ended: by an end token, by one that came too early, or at the length limit.

    Engines tell ends from cuts; which ends are early is decided once, by
    :func:`lightning_rlhf.rewards.termination.classify`.
    """

    NATURAL = 0
    EARLY = 1
    TRUNCATED = 2


class Safety(IntEnum):
    """What a safety filter made of a response.

    ``REDRAWN``: an earlier draw was unsafe, this one is not. ``UNSAFE``: it is, and so were all draws before it.
    ``REPLACED``: the configured reply stands in its place. ``CACHED``: an earlier answer of the policy does.
    """

    SAFE = 0
    REDRAWN = 1
    UNSAFE = 2
    REPLACED = 3
    CACHED = 4


@dataclass
class PromptBatch:
    """Prompts as they leave the data module; the rollout engine pads them.

    Attributes:
        ids: token ids of each prompt, without padding.
        texts: the rendered prompt texts (for display and rewards, never tokenised again).
        keys: stable hash of each prompt's content, see :func:`prompt_key`.
        rows: the data row of each prompt, handed to the rewards.
        passes: completed passes over the data when the prompt was drawn (the data epoch).
        copies: how many earlier rows of the data have the same key; all 0 if not given. Copies of a prompt in one pass
            get different seeds.
        kl_scales: factor on the KL coefficient of each prompt; empty where no prompt has one of its own.
        groups: what the column ``data.group_column`` says of each prompt, as text; empty without such a column.
    """

    ids: list[list[int]]
    texts: list[str]
    keys: list[str]
    rows: list[dict[str, Any]]
    passes: list[int]
    copies: list[int] = field(default_factory=list)
    kl_scales: list[float] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copies = self.copies or [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, count: int) -> PromptBatch:
        """The first ``count`` prompts, or all if there are fewer."""
        return PromptBatch(*(getattr(self, f.name)[:count] for f in fields(self)))

    def repeat(self, samples: int) -> PromptBatch:
        """Each prompt ``samples`` times in a row."""

        def each(items: list[Any]) -> list[Any]:
            return [item for item in items for _ in range(samples)]

        return PromptBatch(*(each(getattr(self, f.name)) for f in fields(self)))

    def part(self, rows: slice) -> PromptBatch:
        """The prompts of a slice."""
        return PromptBatch(*(getattr(self, f.name)[rows] for f in fields(self)))


_Rows = TypeVar("_Rows", bound="Rollout")


@dataclass
class Rollout:
    """What the rollout engine returns.

    Attributes:
        prompt_ids: ``[B, P]`` int64, left-padded.
        prompt_mask: ``[B, P]`` bool, true on prompt tokens.
        response_ids: ``[B, R]`` int64, right-padded.
        response_mask: ``[B, R]`` bool, true on every generated token **including the end token**. It comes from
            the number of generated tokens, never from comparing ids with the padding id (which may equal EOS).
        rollout_logprobs: ``[B, R]`` float32, log-probability (nats) of each sampled token under the distribution
            it was sampled from, i.e. after temperature, top-k and top-p. Zero on padding.
        finish: ``[B]`` int64, values of :class:`Finish`.
        policy_version: ``[B]`` int64, number of iterations that had trained the weights which sampled the row.
        seed: ``[B]`` int64, the seed the row was sampled with.
        group: ``[B]`` int64, index of the prompt in the batch; samples of one prompt share it.
        prompt_key: stable hash of each row's prompt.
        max_new_tokens: ``[B]`` int64, the length limit in force when the row was drawn; ``None`` if it was drawn by
            calling the engine itself.
        safety: ``[B]`` int64, values of :class:`Safety`; ``None`` without a safety filter.
        unsafe_draws: for each row its unsafe draws, see :func:`lightning_rlhf.screening.screened`; empty without one.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    finish: Tensor
    policy_version: Tensor
    seed: Tensor
    group: Tensor
    prompt_key: list[str]
    max_new_tokens: Tensor | None = None
    safety: Tensor | None = None
    unsafe_draws: list[list[dict[str, Any]]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` number of generated tokens per row."""
        return self.response_mask.sum(-1)

    def lengths(self) -> list[tuple[int, int]]:
        """Prompt tokens and generated tokens of each row, on the host (one transfer)."""
        prompts, responses = torch.stack([self.prompt_mask.sum(-1), self.response_lengths]).tolist()
        return list(zip(prompts, responses, strict=True))

    def concatenated(self) -> tuple[Tensor, Tensor]:
        """``input_ids [B, T]`` and ``attention_mask [B, T]`` (bool): prompt and response side by side."""
        return (
            torch.cat([self.prompt_ids, self.response_ids], dim=1),
            torch.cat([self.prompt_mask, self.response_mask], dim=1),
        )

    def select(self: _Rows, rows: Tensor) -> _Rows:
        """The given rows (int64 index) of every per-sequence field; scalar fields are kept."""
        index = rows.tolist()
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and value.ndim > 0:
                changes[f.name] = value[rows.to(value.device)]
            elif isinstance(value, list) and value:
                changes[f.name] = [value[i] for i in index]
            elif isinstance(value, dict):
                changes[f.name] = {name: tensor[rows.to(tensor.device)] for name, tensor in value.items()}
        return replace(self, **changes)

    def cut(self: _Rows, prompt_columns: int, response_columns: int) -> _Rows:
        """Only the last ``prompt_columns`` of the prompts and the first ``response_columns`` of the responses."""
        left = self.prompt_mask.shape[1] - prompt_columns
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and value.ndim == 2:
                changes[f.name] = value[:, left:] if f.name.startswith("prompt_") else value[:, :response_columns]
        return replace(self, **changes)

    def trim(self: _Rows) -> _Rows:
        """Without the columns that are padding in every row. At least one response column is kept."""
        return self.cut(int(self.prompt_mask.sum(-1).max()), max(1, int(self.response_lengths.max())))

    @staticmethod
    def join(parts: Sequence[Rollout], pad_id: int) -> Rollout:
        """Concatenate rollouts of consecutive parts of a prompt batch into one, padded with ``pad_id``."""
        prompt, response = (max(getattr(p, f"{n}_mask").shape[1] for p in parts) for n in ("prompt", "response"))
        groups = itertools.accumulate((int(p.group[-1]) + 1 for p in parts), initial=0)
        joined: dict[str, Any] = {
            "group": torch.cat([p.group + first for p, first in zip(parts, groups, strict=False)]),
            "prompt_key": [key for p in parts for key in p.prompt_key],
            "unsafe_draws": [draws for p in parts for draws in p.unsafe_draws],
        }
        for f in fields(Rollout):
            if f.name in joined:
                continue
            tensors = [getattr(p, f.name) for p in parts]
            if any(t is None for t in tensors):
                continue
            if tensors[0].ndim == 2:
                fill = pad_id if f.name.endswith("_ids") else 0
                left = f.name.startswith("prompt_")
                columns = prompt if left else response
                tensors = [_pad(t, columns, fill, left=left) for t in tensors]
            joined[f.name] = torch.cat(tensors)
        return Rollout(**joined)

    def to(self: _Rows, device: torch.device | str) -> _Rows:
        """Every tensor on ``device``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changes: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        for name, terms in values.items():
            if isinstance(terms, dict):  # the reward terms of an experience
                changes[name] = {term: v.to(device) for term, v in terms.items()}
        return replace(self, **changes)


def _pad(tensor: Tensor, columns: int, fill: int, *, left: bool) -> Tensor:
    missing = columns - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing), value=fill)


@dataclass
class Experience(Rollout):
    """A rollout with everything the update needs. Each step of the iteration only adds fields.

    Attributes:
        prompts: prompt texts, for display.
        texts: decoded responses, for rewards and display.
        prompt_group: what ``data.group_column`` says of each row's prompt; empty without such a column.
        scores: ``[B]`` float32, the reward as scored, one number per sequence.
        own: ``[B]`` bool, rows whose scores are measured; absent means all. False where the safety filter has put
            another text in place of a response, or left it out.
        components: the terms of the reward by name, each ``[B]``.
        rewards: ``[B]`` float32, the score after clipping, penalties of termination and normalisation.
        old_logprobs: ``[B, R]`` log-probabilities under the policy before the update.
        ref_logprobs: ``[B, R]`` log-probabilities under the reference model.
        kl_scale: ``[B]`` factor on the KL coefficient of each row; absent means 1.
        entropy: ``[B, R]`` entropy (nats) of the policy before the update.
        penalty: ``[B]`` float32, added to the score beside the penalties of termination (safety filter).
        reward_override: ``[B, R]`` float32; where not NaN it replaces the token's reward, after normalisation and the
            KL penalty, before advantages.
        values: ``[B, R]`` value of the state in which token ``t`` was chosen.
        final_values: ``[B]`` value of the state after the last token; the bootstrap of truncated rows.
        advantages: ``[B, R]``.
        returns: ``[B, R]``, target of the value function.
        loss_mask: ``[B, R]`` bool, the response mask after rejection.
        is_weights: ``[B, R]`` importance weights, detached; absent means 1.
    """

    prompts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt_group: list[str] = field(default_factory=list)
    scores: Tensor | None = None
    own: Tensor | None = None
    components: dict[str, Tensor] = field(default_factory=dict)
    rewards: Tensor | None = None
    penalty: Tensor | None = None
    reward_override: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl_scale: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    loss_mask: Tensor | None = None
    is_weights: Tensor | None = None

    @classmethod
    def from_rollout(cls, rollout: Rollout, prompts: list[str], texts: list[str]) -> Experience:
        """The experience before anything is scored: every generated token counts in the loss."""
        own = {f.name: getattr(rollout, f.name) for f in fields(Rollout)}
        return cls(**own, prompts=prompts, texts=texts, loss_mask=rollout.response_mask)

    def require(self, name: str) -> Tensor:
        """The field ``name``, or a clear error if no earlier step filled it."""
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(f"experience.{name} is read before a step of the iteration filled it")
        return value


@dataclass
class MiniBatch(Experience):
    """Rows of one optimiser step, or a micro-batch of them.

    ``scale`` holds the loss denominators: valid tokens, and sequences with a valid token, of the **whole minibatch
    over all ranks**. Micro-batches keep it unchanged, so the gradient does not depend on the split. ``part`` says which
    of the ``parts`` micro-batches this is, of those that this rank computes for the minibatch; a loss term with data
    of its own is divided among them.
    """

    scale: LossScale = TOKEN_MEAN
    part: int = 0
    parts: int = 1

    @property
    def tokens(self) -> float:
        """Valid tokens of the whole minibatch, the denominator of a custom loss; 0 if unknown."""
        return float(self.scale.tokens or 0.0)

    @property
    def sequences(self) -> float:
        """Sequences with a valid token in the whole minibatch; 0 if unknown."""
        return float(self.scale.sequences or 0.0)

    @classmethod
    def from_experience(cls, experience: Experience, rows: Tensor, scale: LossScale) -> MiniBatch:
        """The given rows of the experience, with the scale of the whole minibatch's loss."""
        chosen = experience.select(rows)
        own = {f.name: getattr(chosen, f.name) for f in fields(Experience)}
        return cls(**own, scale=scale)


def split_by_tokens(
    rows: _Rows, lengths: list[tuple[int, int]], budget: int, most: int | None = None
) -> Iterator[tuple[Tensor, _Rows]]:
    """Cut rows into parts of at most ``budget`` tokens, padding included, and at most ``most`` rows.

    Rows of similar length share a part and padding columns are cut, so little of the budget is padding. A single row
    longer than the budget forms a part of its own.

    Args:
        rows: a rollout, experience or minibatch.
        lengths: prompt and response tokens of each row, see :meth:`Rollout.lengths`.
        budget: tokens of one part.
        most: rows of one part; ``None`` for no limit.

    Yields:
        The row indices of each part, and the part.
    """
    order = sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
    parts: list[tuple[list[int], int, int]] = []
    for i in order:
        prompt, response = lengths[i]
        if parts:
            members, widest_prompt, widest_response = parts[-1]
            columns = max(prompt, widest_prompt), max(response, widest_response)
            if (len(members) + 1) * sum(columns) <= budget and (most is None or len(members) < most):
                parts[-1] = ([*members, i], *columns)
                continue
        parts.append(([i], prompt, max(1, response)))
    for members, prompt, response in parts:
        index = torch.tensor(members)
        yield index, rows.select(index).cut(prompt, response)


def prompt_key(prompt: Any) -> str:
    """Stable 16-digit hash of a prompt's content: the same on every machine and with every tokenizer.

    The prompt is hashed as stored in the data, before chat template, configured system prompt and tokenizer. Other
    columns of the row, the order of a message's keys, keys without a value, and Unicode's ways of writing one character
    (normalised to NFC) make no difference. A text and one user message of that text are the same prompt.

    Args:
        prompt: text, or a list of chat messages, as it stands in the data.
    """
    content = _canonical(prompt)
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        [message] = content
        if message.keys() == {"role", "content"} and message["role"] == "user":
            content = message["content"]
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _canonical(value: Any) -> Any:
    """Strings in normal form C, mappings without empty entries (Parquet gives every message every key)."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, Mapping):
        return {_canonical(str(name)): _canonical(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


def sample_seed(seed: int, key: str, sample: int, data_pass: int, copy: int = 0) -> int:
    """Seed (63 bits) of one sample: a hash of run seed, prompt key, sample index, data pass and copy.

    It does not depend on the batch, the rank or the iteration, so one sample can be reproduced alone. ``copy`` counts
    earlier rows of the data with the same prompt; the first row's seed does not depend on whether others follow.
    """
    words = f"{seed}/{key}/{sample}/{data_pass}" + (f"/{copy}" if copy else "")
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
