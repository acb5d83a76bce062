"""Builds a rollout from the plain lists per row that an engine returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_rlhf.experience import Finish, PromptBatch, Rollout, sample_seed
from lightning_rlhf.rollout.base import length_mask, pad_left

FINISH = {"stop": Finish.NATURAL, "length": Finish.TRUNCATED}
"""Finish reasons of vLLM, which are also those of the OpenAI API."""


@dataclass(frozen=True)
class Generated:
    """One response.

    Attributes:
        ids: generated tokens, end token included.
        logprobs: log-probability (nats) of each under the distribution it was sampled from; not finite where the engine
            could not compute it.
        finish: vLLM's finish reason.
        version: version of the weights that sampled it.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None
    version: int


def row_seeds(prompts: PromptBatch, samples: int, seed: int) -> list[int]:
    """Every row's seed, see :func:`lightning_rlhf.experience.sample_seed`; a prompt has ``samples`` adjacent rows."""
    asked = zip(prompts.keys, prompts.passes, prompts.copies, strict=True)
    return [sample_seed(seed, key, sample, *drawn) for key, *drawn in asked for sample in range(samples)]


def finish_code(reason: str | None, key: str = "?") -> Finish:
    """The finish code of vLLM's ``finish_reason``.

    Raises:
        RuntimeError: the response was not completed (``abort``, ``error``, none): it must not be trained on.
    """
    if reason not in FINISH:
        raise RuntimeError(
            f"the engine returned a response to prompt {key} that it did not complete: finish reason {reason!r}, "
            f"allowed are {', '.join(FINISH)}"
        )
    return FINISH[reason]


def assemble_rollout(
    prompts: PromptBatch, responses: Sequence[Generated], seeds: Sequence[int], *, pad_id: int
) -> Rollout:
    """A rollout on the CPU.

    Args:
        prompts: the prompts, each once.
        responses: ``len(responses) / len(prompts)`` adjacent rows of each.
        seeds: of the rows.
        pad_id: id on padding.

    Raises:
        RuntimeError: a response is missing, empty, not completed, or lacks log-probabilities for some tokens.
    """
    samples, rest = divmod(len(responses), len(prompts))
    if rest or not samples or len(seeds) != len(responses):
        raise RuntimeError(
            f"the engine returned {len(responses)} responses to {len(prompts)} prompts ({len(seeds)} rows were asked)"
        )
    keys = prompts.repeat(samples).keys
    finish = [int(finish_code(r.finish, key)) for r, key in zip(responses, keys, strict=True)]
    for key, response in zip(keys, responses, strict=True):
        if not response.ids or len(response.ids) != len(response.logprobs):
            raise RuntimeError(
                f"the engine returned {len(response.ids)} tokens and {len(response.logprobs)} log-probabilities for "
                f"prompt {key}; at least one of each is needed, and as many"
            )
    lengths = torch.tensor([len(r.ids) for r in responses])
    mask = length_mask(lengths, int(lengths.max()))
    ids = torch.full(mask.shape, pad_id, dtype=torch.int64)
    ids[mask] = torch.tensor([i for r in responses for i in r.ids], dtype=torch.int64)
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = torch.tensor([p for r in responses for p in r.logprobs], dtype=torch.float32)
    versions = torch.tensor([r.version for r in responses])
    prompt_ids, prompt_mask = pad_left(prompts.ids, pad_id)
    group = torch.arange(len(prompts)).repeat_interleave(samples)
    return Rollout(
        prompt_ids=prompt_ids[group],
        prompt_mask=prompt_mask[group],
        response_ids=ids,
        response_mask=mask,
        rollout_logprobs=logprobs,
        finish=torch.tensor(finish),
        policy_version=versions,
        seed=torch.tensor(seeds, dtype=torch.int64),
        group=group,
        prompt_key=keys,
    )
