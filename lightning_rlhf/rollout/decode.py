"""The decode loop: one token per row and step; finished rows are removed from the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_rlhf.experience import Finish
from lightning_rlhf.rollout.base import Sampling
from lightning_rlhf.rollout.cached_model import CachedModel
from lightning_rlhf.rollout.sampling import draw

LEAVING = 1 / 8
"""Finished rows are taken out once they are this share of the batch: later steps cost less, but the cache is copied."""


@dataclass
class Response:
    """The responses being generated, filled in place."""

    ids: Tensor
    """``[B, R]`` int64; columns from ``lengths`` on are undefined."""
    logprobs: Tensor
    """``[B, R]`` float32, as ``ids``."""
    lengths: Tensor
    """``[B]`` int64, tokens generated, end token included."""
    finish: Tensor
    """``[B]`` int64, see :class:`Finish`."""

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Response:
        return cls(
            ids=torch.zeros(rows, columns, dtype=torch.int64, device=device),
            logprobs=torch.zeros(rows, columns, dtype=torch.float32, device=device),
            lengths=torch.ones(rows, dtype=torch.int64, device=device),
            finish=torch.full((rows,), int(Finish.NATURAL), device=device),
        )

    def rows(self, part: slice) -> Response:
        """Views of some rows."""
        return Response(self.ids[part], self.logprobs[part], self.lengths[part], self.finish[part])


@dataclass
class RunningBatch:
    """The rows that are still in the batch, N of them."""

    row: Tensor
    """``[N]`` their row numbers in :class:`Response`."""
    active: Tensor
    """``[N]`` bool; false: the row has ended and is removed later."""
    uniforms: Tensor
    """``[N, R]`` random numbers in [0, 1), one per token."""
    mask: Tensor | None
    """``[N, P + R]`` bool over prompt and future tokens; ``None`` if no prompt is padded."""
    position: Tensor
    """``[N, 1]`` position id of the next token."""
    cache: DynamicCache
    columns: int
    """Tokens per row in the cache, padding included."""

    def keep(self, index: Tensor) -> None:
        """Keep only the given rows."""
        self.cache.reorder_cache(index)  # type: ignore[arg-type]
        self.row, self.active, self.uniforms = self.row[index], self.active[index], self.uniforms[index]
        self.mask = None if self.mask is None else self.mask[index]
        self.position = self.position[index]

    def append(self, model: CachedModel, tokens: Tensor) -> Tensor:
        """Feed one token ``[N]`` per row; returns the logits ``[N, V]`` after it."""
        self.columns += 1
        mask = None if self.mask is None else self.mask[:, : self.columns]
        logits = model(tokens.unsqueeze(-1), mask, self.position, self.cache)
        self.position = self.position + 1
        return logits


def prefill(
    model: CachedModel, ids: Tensor, mask: Tensor, of_row: Tensor, uniforms: Tensor
) -> tuple[RunningBatch, Tensor]:
    """Run the model once on each distinct prompt; row ``n`` of the batch continues prompt ``of_row[n]``.

    Args:
        model: the model.
        ids: ``[M, P]`` distinct prompts, left-padded.
        mask: ``[M, P]`` bool.
        of_row: ``[N]`` index of each row's prompt.
        uniforms: ``[N, R]``.

    Returns:
        The batch, and the logits ``[N, V]`` of the first response token.
    """
    padded = not bool(mask.all())
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    cache = model.new_cache()
    logits = model(ids, mask if padded else None, positions, cache)
    if len(of_row) > len(ids):
        cache.reorder_cache(of_row)  # type: ignore[arg-type]
    future = torch.ones_like(uniforms, dtype=torch.bool)
    batch = RunningBatch(
        row=torch.arange(len(of_row), device=ids.device),
        active=future[:, 0],
        uniforms=uniforms,
        mask=torch.cat([mask[of_row], future], dim=1) if padded else None,
        position=positions[of_row, -1:] + 1,
        cache=cache,
        columns=ids.shape[1],
    )
    return batch, logits[of_row]


def decode(
    model: CachedModel, batch: RunningBatch, logits: Tensor, sampling: Sampling, ends: list[int], response: Response
) -> None:
    """Fill ``response`` token by token until every row has ended or has ``max_new_tokens``."""
    is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    is_end[ends] = True
    for step in range(sampling.max_new_tokens):
        tokens, logprobs = draw(logits, batch.uniforms[:, step], sampling)
        response.ids[batch.row, step], response.logprobs[batch.row, step] = tokens, logprobs
        batch.active = batch.active & ~is_end[tokens]
        if step + 1 == sampling.max_new_tokens:
            break
        active = int(batch.active.sum())  # the one synchronisation of a step
        if active == 0:
            break
        response.lengths[batch.row] += batch.active
        if active <= (1 - LEAVING) * len(tokens):
            staying = batch.active.nonzero().squeeze(-1)
            batch.keep(staying)
            tokens = tokens[staying]
        logits = batch.append(model, tokens)
    response.finish[batch.row] = torch.where(batch.active, int(Finish.TRUNCATED), int(Finish.NATURAL))
