"""Unsafe responses are drawn anew or replaced before anything else reads the rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.prompts import refuse_unknown_characters
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import Finish, PromptBatch, Rollout, Safety, sample_seed
from lightning_rlhf.rewards.answers import AnswerCache
from lightning_rlhf.rewards.safety import BLOCK, SafetyFilter, SafetySettings
from lightning_rlhf.settings import build

Draw = Callable[[PromptBatch, int, int], Rollout]
"""Draws responses: prompts, samples of each, seed of the run."""

OF_THE_PROMPT = ("prompt_ids", "prompt_mask", "group", "prompt_key")
"""Fields that a new response to the same prompt does not change."""


def screened(
    draw: Draw,
    prompts: PromptBatch,
    samples: int,
    safety: SafetyFilter,
    texts: Callable[[Rollout], list[str]],
    *,
    seed: int,
    pad_id: int,
    reply: Sequence[int] = (),
    answers: AnswerCache | None = None,
    longest: int = 0,
) -> Rollout:
    """A rollout of as many rows as asked for, with ``safety`` set to what became of each.

    ``unsafe_draws`` has every unsafe draw, as :meth:`SafetyFilter.findings` tells it, and its ``outcome``: discarded
    (another was drawn), left_out (of the loss), penalised, replaced (by the reply) or cached (an earlier answer).

    A new draw has a seed of its own for each row and attempt, so it does not depend on which other rows are unsafe.
    Nothing here communicates: ranks may need different numbers of draws.

    Args:
        draw: of the engine.
        prompts: each once.
        samples: responses to each.
        safety: judges the responses.
        texts: decodes the responses of a rollout.
        seed: of the run.
        pad_id: of the policy.
        reply: token ids of the safe reply, end token included.
        answers: earlier answers, which come before the reply; nothing is added to them.
        longest: tokens of such an answer at most.
    """
    rollout = draw(prompts, samples, seed)
    draws = [[] if finding is None else [finding] for finding in safety.findings(texts(rollout))]
    unsafe = torch.tensor([bool(found) for found in draws])
    codes = torch.where(unsafe, int(Safety.UNSAFE), int(Safety.SAFE))
    if safety.settings.action == "discard_resample":
        for attempt in range(1, safety.settings.attempts + 1):
            rows = (codes == Safety.UNSAFE).nonzero().flatten()
            if not len(rows):
                break
            fresh = draw(_one_each(prompts, rows.tolist(), samples), 1, sample_seed(seed, "safety", attempt, 0))
            rollout = put(rollout, rows, fresh, pad_id)
            for row, finding in zip(rows.tolist(), safety.findings(texts(fresh)), strict=True):
                codes[row] = int(Safety.REDRAWN if finding is None else Safety.UNSAFE)
                draws[row] += [] if finding is None else [finding]
    if safety.settings.action == "replace" and unsafe.any():
        rows = unsafe.nonzero().flatten()
        asked = rollout.select(rows)
        earlier = _still_safe(asked, answers, safety, texts, longest, pad_id)
        written = _written(asked, [reply if answer is None else answer for answer in earlier], pad_id)
        rollout = put(rollout, rows, written, pad_id)
        codes[rows] = torch.tensor([int(Safety.REPLACED if answer is None else Safety.CACHED) for answer in earlier])
    _set_outcomes(draws, codes, safety.settings.action)
    return replace(rollout, safety=codes.to(rollout.finish.device), unsafe_draws=draws)


def _set_outcomes(draws: list[list[dict[str, Any]]], codes: Tensor, action: str) -> None:
    """Note what became of each unsafe draw; all but the last one of a row were followed by another draw."""
    stays = "penalised" if action == "penalise" else "left_out"
    last = {Safety.UNSAFE: stays, Safety.REPLACED: "replaced", Safety.CACHED: "cached"}
    for of_row, code in zip(draws, codes.tolist(), strict=True):
        for draw in of_row:
            draw["outcome"] = last.get(code, "discarded") if draw is of_row[-1] else "discarded"


def put(rollout: Rollout, rows: Tensor, fresh: Rollout, pad_id: int) -> Rollout:
    """The rollout with the responses of ``fresh`` in the given rows."""
    width = max(rollout.response_ids.shape[1], fresh.response_ids.shape[1])
    changes: dict[str, Any] = {}
    for f in fields(Rollout):
        old, new = getattr(rollout, f.name), getattr(fresh, f.name)
        if f.name in OF_THE_PROMPT or not isinstance(old, Tensor):
            continue
        if old.ndim == 2:
            fill = pad_id if f.name.endswith("_ids") else 0
            old, new = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill) for x in (old, new))
        changes[f.name] = old.clone()
        changes[f.name][rows.to(old.device)] = new.to(old.device)
    return replace(rollout, **changes)


def _one_each(prompts: PromptBatch, rows: list[int], samples: int) -> PromptBatch:
    """The prompt of each row; rows of one prompt count as copies, so that their draws differ."""
    places = [divmod(row, samples) for row in rows]
    lists = {f.name: getattr(prompts, f.name) for f in fields(PromptBatch)}
    chosen = {name: [of[prompt] for prompt, _ in places] if of else [] for name, of in lists.items()}
    chosen["copies"] = [prompts.copies[prompt] * samples + sample for prompt, sample in places]
    return PromptBatch(**chosen)


def _still_safe(
    rows: Rollout,
    answers: AnswerCache | None,
    safety: SafetyFilter,
    texts: Callable[[Rollout], list[str]],
    longest: int,
    pad_id: int,
) -> list[list[int] | None]:
    """Token ids of the earlier answer for each row; ``None`` where there is none.

    Each is judged again: a resumed run may have other words, patterns or another classifier than it was kept under.
    """
    found = [None] * len(rows) if answers is None else answers.for_rows(rows, longest)
    tokens: list[list[int] | None] = [None if answer is None else answer.tolist() for answer in found]
    chosen = [row for row, answer in enumerate(tokens) if answer is not None]
    if chosen:
        written = _written(rows.select(torch.tensor(chosen)), [tokens[row] or [] for row in chosen], pad_id)
        for row, unsafe in zip(chosen, safety.unsafe(texts(written)), strict=True):
            if unsafe:
                tokens[row] = None
    return tokens


def _written(rows: Rollout, tokens: Sequence[Sequence[int]], pad_id: int) -> Rollout:
    """The rows with these tokens as responses; the policy did not draw them, so they have no log-probability (NaN)."""
    lengths = torch.tensor([len(ids) for ids in tokens])
    width = int(lengths.max())
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in tokens], device=rows.response_ids.device)
    mask = (torch.arange(width) < lengths.unsqueeze(1)).to(ids.device)
    return replace(
        rows,
        response_ids=ids,
        response_mask=mask,
        rollout_logprobs=torch.zeros_like(ids, dtype=rows.rollout_logprobs.dtype).masked_fill(mask, torch.nan),
        finish=torch.full_like(rows.finish, int(Finish.NATURAL)),
    )


def reply_tokens(
    safety: Mapping[str, Any] | SafetySettings | None, tokenizer: PreTrainedTokenizerBase, most: int
) -> list[int]:
    """Tokens of the reply in place of unsafe responses, end token included; empty if none is replaced.

    Args:
        safety: block of the filter, if there is one.
        tokenizer: of the policy.
        most: longest response.

    Raises:
        SettingError: the reply is longer than that, or has characters that the tokenizer lacks; the block is wrong.
    """
    reply = None if safety is None else build(SafetySettings, BLOCK, safety).reply
    if reply is None:
        return []
    key = f"{BLOCK}.reply"
    try:
        ids = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    except Exception as error:  # its class depends on the tokenizer
        try:
            refuse_unknown_characters(tokenizer, reply, "a text that the model can read")
        except ValueError as known:
            raise SettingError(key, reply, str(known)) from error
        raise SettingError(key, reply, f"a text that the tokenizer reads; it says: {error}") from error
    if len(ids) > most:
        allowed = f"at most rollout.max_new_tokens = {most} tokens with the end token, not {len(ids)}"
        raise SettingError(key, reply, allowed)
    return ids
