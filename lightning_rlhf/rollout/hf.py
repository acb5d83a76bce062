"""The embedded engine: generation in this process, on the weights that are being trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlhf.experience import PromptBatch, Rollout, sample_seed
from lightning_rlhf.rollout.ahead import Ahead
from lightning_rlhf.rollout.base import Sampling, length_mask, pad_left
from lightning_rlhf.rollout.cache import CachedModel
from lightning_rlhf.rollout.decode import Response, decode, prefill
from lightning_rlhf.rollout.guard import generation_mode
from lightning_rlhf.rollout.sampling import row_uniforms

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_NO_CHOICE = ("eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "transformers_version")
_NO_CHOICE_PREFIXES = ("_", "output_", "return_")
"""Entries of a generation config that are no sampling options."""


class HFEngine:
    """Generation with a Hugging Face causal language model and its key-value cache.

    A row's tokens are a function of its prompt, the weights and its own seed: it does not matter who else is in the
    batch, in which order, or when the others finish (up to floating-point rounding, which depends on the shape of a
    matrix product). The global random state is neither read nor changed. Rows that finish leave the batch. What the
    checkpoint's generation config says about sampling is **not** applied; :meth:`describe` lists it.

    Args:
        temperature: divides the logits.
        top_k: only the ``top_k`` likeliest tokens may be drawn; 0 switches it off.
        top_p: only the smallest set of likeliest tokens with this mass may be drawn; 1 switches it off.
        samples: responses per prompt.
        max_new_tokens: limit of the response length, end token included.
        stop_token_ids: ids that end a response, beside all end tokens of tokenizer, model and generation config.
        ignore_eos: no token ends a response; each has exactly ``max_new_tokens`` (benchmarks).
        max_batch_tokens: limit of rows x (longest prompt + ``max_new_tokens``) generated at a time; bounds the
            memory of the cache, changes no sample. ``None``: everything at once.
        lag: 1 generates the next batch while this one is trained on, from a copy of the language model; 0 generates
            with the trained weights themselves.
        max_staleness: see :class:`~lightning_rlhf.rollout.Ahead`.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        samples: int = 1,
        max_new_tokens: int = 64,
        stop_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        max_batch_tokens: int | None = None,
        lag: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        self.sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, samples=samples, max_new_tokens=max_new_tokens
        )
        self.ahead = Ahead(lag, max_staleness)
        if max_batch_tokens is not None and (not isinstance(max_batch_tokens, int) or max_batch_tokens < 1):
            raise ValueError(
                f"rollout.max_batch_tokens = {max_batch_tokens!r} is not allowed: an integer >= 1, or null for no limit"
            )
        if isinstance(stop_token_ids, (str, int)):
            raise ValueError(
                f"rollout.stop_token_ids = {stop_token_ids!r} is not allowed: a list of token ids, or null"
            )
        self.stop_token_ids = list(stop_token_ids or ())
        self.ignore_eos = ignore_eos
        self.max_batch_tokens = max_batch_tokens
        self.policy_version = 0
        self._model: CachedModel | None = None
        self._trained: PreTrainedModel | None = None
        """Where weights are copied from, if this engine has a model of its own."""
        self._stop_ids: list[int] = []
        self._pad_id = 0
        self._ignored: dict[str, Any] = {}

    def setup(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Bind model and tokenizer; see :meth:`RolloutEngine.setup`.

        Raises:
            ValueError: a stop token lies outside the vocabulary, or the model takes no key-value cache.
        """
        self._trained = lm if self.ahead.lag else None
        self._model = model = CachedModel(deepcopy(lm).requires_grad_(False) if self.ahead.lag else lm)
        vocabulary = model.vocabulary
        for token in self.stop_token_ids:
            if not (isinstance(token, int) and 0 <= token < vocabulary):
                raise ValueError(
                    f"rollout.stop_token_ids holds {token!r}, which is not allowed: ids from 0 to {vocabulary - 1}"
                )
        generation = getattr(model.lm, "generation_config", None)
        known = _ids(tokenizer) | _ids(generation) | _ids(model.lm.config.get_text_config())
        self._stop_ids = sorted({i for i in known if 0 <= i < vocabulary} | set(self.stop_token_ids))
        pads = (tokenizer.pad_token_id, *self._stop_ids)
        self._pad_id = next((i for i in pads if i is not None and 0 <= i < vocabulary), 0)
        self._ignored = _sampling_options(generation)
        self._announce()

    def update_weights(self, version: int) -> None:
        """Shared weights need no transfer, and no cache outlives :meth:`generate`; with ``lag = 1`` they are copied."""
        self.policy_version = version
        if self._trained is not None:
            own = self._bound().lm.state_dict()
            with torch.no_grad():
                for name, tensor in self._trained.state_dict().items():
                    own[name].copy_(tensor)

    def describe(self) -> dict[str, Any]:
        """Every setting in force, as plain values; ``ignored_generation_config`` is what the checkpoint wanted."""
        self._bound()
        return {
            "engine": "hf",
            **{name: value for name, value in asdict(self.sampling).items() if name != "greedy"},
            "stop_token_ids": [] if self.ignore_eos else self._stop_ids,
            "ignore_eos": self.ignore_eos,
            "max_batch_tokens": self.max_batch_tokens,
            **asdict(self.ahead),
            "ignored_generation_config": self._ignored,
        }

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        """Draw ``samples`` responses to each prompt; see :meth:`RolloutEngine.generate`.

        Returns:
            A rollout on the model's device; R is the length of its longest response.

        Raises:
            ValueError: no prompt, an empty prompt, or prompt and response exceed the model's positions.
            FloatingPointError: the model's logits are not finite.
        """
        model = self._bound()
        sampling = replace(self.sampling, samples=samples, max_new_tokens=max_new_tokens, greedy=greedy)
        _check_lengths(prompts, max_new_tokens, model.max_positions)
        device = model.device
        prompt_ids, prompt_mask = (block.to(device) for block in pad_left(prompts.ids, self._pad_id))
        group = torch.arange(len(prompts), device=device).repeat_interleave(samples)
        rows = prompts.repeat(samples)
        draws = enumerate(zip(rows.keys, rows.passes, strict=True))
        seeds = [sample_seed(seed, key, i % samples, data_pass) for i, (key, data_pass) in draws]
        uniforms = row_uniforms(seeds, max_new_tokens).to(device)
        response = Response.empty(len(rows), max_new_tokens, device)
        with generation_mode(model.lm):
            for part in self._parts(len(rows), prompt_ids.shape[1] + max_new_tokens):
                distinct, of_row = group[part].unique_consecutive(return_inverse=True)
                batch, logits = prefill(model, prompt_ids[distinct], prompt_mask[distinct], of_row, uniforms[part])
                decode(model, batch, logits, sampling, self._ends(), response.rows(part))
        columns = int(response.lengths.max())
        mask = length_mask(response.lengths, columns)
        _check_finite(response.logprobs[:, :columns].where(mask, 0.0), rows.keys, self.policy_version)
        return Rollout(
            prompt_ids=prompt_ids[group],
            prompt_mask=prompt_mask[group],
            response_ids=response.ids[:, :columns].where(mask, self._pad_id),
            response_mask=mask,
            rollout_logprobs=response.logprobs[:, :columns].where(mask, 0.0),
            finish=response.finish,
            policy_version=torch.full_like(group, self.policy_version),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            group=group,
            prompt_key=rows.keys,
        )

    def _announce(self) -> None:
        """Log what a user may not expect."""
        if not self._stop_ids and not self.ignore_eos:
            log.warning("no end token is known: every response will have rollout.max_new_tokens tokens")
        if self.sampling.truncated:
            log.warning(
                "rollout.top_k = %s, rollout.top_p = %s: the trainer scores tokens over the whole vocabulary, so its "
                "log-probabilities lie below the engine's by the log of the mass that was kept",
                self.sampling.top_k,
                self.sampling.top_p,
            )
        if self._ignored:
            log.info("sampling options of the checkpoint's generation config, not applied: %s", self._ignored)

    def _parts(self, rows: int, columns: int) -> list[slice]:
        """Rows that are generated together, so that rows x columns stays within ``max_batch_tokens``."""
        size = rows if self.max_batch_tokens is None else max(1, self.max_batch_tokens // columns)
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _ends(self) -> list[int]:
        return [] if self.ignore_eos else self._stop_ids

    def _bound(self) -> CachedModel:
        if self._model is None:
            raise RuntimeError("HFEngine.setup(lm, tokenizer) comes before any other call")
        return self._model


def _ids(source: object) -> set[int]:
    """End tokens of a tokenizer or configuration: none, one or several."""
    ids = getattr(source, "eos_token_id", None)
    return set() if ids is None else set(ids) if isinstance(ids, (list, tuple)) else {ids}


def _sampling_options(generation: GenerationConfig | None) -> dict[str, Any]:
    """What a generation config sets about the choice of tokens, beside end tokens, which act here too."""
    options = {} if generation is None else generation.to_diff_dict()
    return {
        name: value
        for name, value in options.items()
        if name not in _NO_CHOICE and not name.startswith(_NO_CHOICE_PREFIXES)
    }


def _check_lengths(prompts: PromptBatch, max_new_tokens: int, positions: int | None) -> None:
    if len(prompts) == 0:
        raise ValueError("generate() was given no prompt")
    for key, ids in zip(prompts.keys, prompts.ids, strict=True):
        if not ids:
            raise ValueError(f"prompt {key} has no token")
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ValueError(
                f"rollout.max_new_tokens = {max_new_tokens} is not allowed: with the {len(ids)} tokens of prompt {key} "
                f"the sequence exceeds the model's {positions} positions"
            )


def _check_finite(logprobs: Tensor, keys: list[str], version: int) -> None:
    """Refuse tokens that came from logits that are NaN or infinite, naming the first of them."""
    bad = ~logprobs.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise FloatingPointError(
            f"the model's logits are not finite: response token {column} of prompt {keys[row]} has log-probability "
            f"{logprobs[row, column].item()} (policy version {version}, {int(bad.any(-1).sum())} of {len(keys)} rows)"
        )
