"""The embedded engine: generation in this process, on the weights that are being trained."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.bounds import bounded
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.models.weights import whole
from lightning_rlhf.rollout.assemble import row_seeds
from lightning_rlhf.rollout.base import BaseEngine, length_mask, pad_left
from lightning_rlhf.rollout.binding import Binding, announce, bind, check_prompts
from lightning_rlhf.rollout.cached_model import CachedModel
from lightning_rlhf.rollout.decode import Response, decode, prefill
from lightning_rlhf.rollout.generation_mode import generation_mode
from lightning_rlhf.rollout.sampling import row_uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HFEngine(BaseEngine):
    """Generation with a Hugging Face causal language model and its key-value cache.

    A row's tokens are a function of its prompt, the weights and its own seed: other rows of the batch, their order and
    their lengths do not matter (up to floating-point rounding, which depends on the shape of a matrix product). The
    global random state is neither read nor changed. Finished rows are removed from the batch. What the checkpoint's
    generation config says about sampling is **not** applied; :meth:`describe` lists it.

    Args:
        max_batch_tokens: limit of rows x (longest prompt + ``max_new_tokens``) generated at a time; bounds the
            memory of the cache, changes no sample. ``None``: everything at once.
        shared: settings of sampling, end tokens and ``lag``, see :class:`~lightning_rlhf.rollout.base.BaseEngine`.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        bounded("rollout", at_least=1, whole=True, optional=True, max_batch_tokens=max_batch_tokens)
        self.max_batch_tokens = max_batch_tokens
        self._bound: tuple[CachedModel, Binding] | None = None
        self._trained: PreTrainedModel | None = None
        """The trained model to copy weights from, if this engine has its own copy."""

    @property
    def shares_weights(self) -> bool:
        """Whether the trained weights themselves generate; sharded ones have to be gathered around each call."""
        return not self.ahead.lag

    def setup(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Bind model and tokenizer; see :meth:`RolloutEngine.setup`.

        Raises:
            ValueError: a stop token lies outside the vocabulary, or the model takes no key-value cache.
        """
        binding = bind(lm, tokenizer, self.stop_token_ids)
        if self._bound is None or self._trained is not lm:  # in a later stage of a run the model may be sharded already
            self._trained = lm if self.ahead.lag else None
            self._bound = CachedModel(deepcopy(lm).requires_grad_(False) if self.ahead.lag else lm), binding
        announce(binding, self.sampling, ignore_eos=self.ignore_eos)

    def update_weights(self, version: int) -> None:
        """Shared weights need no transfer, and no cache outlives :meth:`generate`; with ``lag = 1`` they are copied."""
        self.policy_version = version
        if self._trained is not None:
            own = self._require_setup()[0].lm.state_dict()
            with torch.no_grad():
                for name, tensor in self._trained.state_dict().items():
                    own[name].copy_(whole(tensor))

    def describe(self) -> dict[str, Any]:
        """Every current setting, as plain values; ``ignored_generation_config`` lists the checkpoint's own."""
        _, binding = self._require_setup()
        return self.described("hf", binding, max_batch_tokens=self.max_batch_tokens)

    def close(self) -> None:
        """Release the model."""
        self._bound = self._trained = None

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        """Draw ``samples`` responses to each prompt; see :meth:`RolloutEngine.generate`.

        Returns:
            A rollout on the model's device; R is the length of its longest response. Logits that are not finite give an
            arbitrary token with log-probability NaN.

        Raises:
            ValueError: no prompt, an empty prompt, or prompt and response exceed the model's positions.
        """
        model, binding = self._require_setup()
        sampling = replace(self.sampling, samples=samples, max_new_tokens=max_new_tokens, greedy=greedy)
        check_prompts(prompts, max_new_tokens, binding.max_positions)
        device = model.device
        prompt_ids, prompt_mask = (block.to(device) for block in pad_left(prompts.ids, binding.pad_id))
        group = torch.arange(len(prompts), device=device).repeat_interleave(samples)
        rows = prompts.repeat(samples)
        seeds = row_seeds(prompts, samples, seed)
        ends = self.ends(binding)
        uniforms = row_uniforms(seeds, max_new_tokens).to(device)
        response = Response.empty(len(rows), max_new_tokens, device)
        with generation_mode(model.lm):
            for part in self._parts(len(rows), prompt_ids.shape[1] + max_new_tokens):
                distinct, of_row = group[part].unique_consecutive(return_inverse=True)
                batch, logits = prefill(model, prompt_ids[distinct], prompt_mask[distinct], of_row, uniforms[part])
                decode(model, batch, logits, sampling, ends, response.rows(part))
        columns = int(response.lengths.max())
        mask = length_mask(response.lengths, columns)
        return Rollout(
            prompt_ids=prompt_ids[group],
            prompt_mask=prompt_mask[group],
            response_ids=response.ids[:, :columns].where(mask, binding.pad_id),
            response_mask=mask,
            rollout_logprobs=response.logprobs[:, :columns].where(mask, 0.0),
            finish=response.finish,
            policy_version=torch.full_like(group, self.policy_version),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            group=group,
            prompt_key=rows.keys,
        )

    def _parts(self, rows: int, columns: int) -> list[slice]:
        """Rows that are generated together, so that rows x columns stays within ``max_batch_tokens``."""
        size = rows if self.max_batch_tokens is None else max(1, self.max_batch_tokens // columns)
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _require_setup(self) -> tuple[CachedModel, Binding]:
        if self._bound is None:
            raise RuntimeError("HFEngine.setup(lm, tokenizer) comes before any other call")
        return self._bound
