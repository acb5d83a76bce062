"""A causal language model as generation sees it: tokens and a key-value cache in, next-token logits out."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lightning_rlhf.rollout.binding import unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GrowingLayer(DynamicLayer):
    """Keys and values of one attention layer in buffers with room to spare.

    The base class copies the whole cache at every token, which for long sequences costs as much as the attention
    itself. Here a token writes one column; only every ``ROOM`` tokens the buffers are copied to larger ones.
    """

    ROOM = 128
    """Columns added when a buffer is full."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._key_buffer, self._value_buffer = key_states[..., :0, :], value_states[..., :0, :]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[N, heads, tokens, head_dim]`` states; returns all states so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self._key_buffer = self._append(self._key_buffer, key_states, length)
        self._value_buffer = self._append(self._value_buffer, value_states, length)
        return self._show(length + key_states.shape[-2])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in this order; a row may be taken several times."""
        length = self.get_seq_length()
        if length > 0:
            self._key_buffer = self._key_buffer.index_select(0, beam_idx)
            self._value_buffer = self._value_buffer.index_select(0, beam_idx)
            self._show(length)

    def _append(self, buffer: Tensor, states: Tensor, length: int) -> Tensor:
        end = length + states.shape[-2]
        if end > buffer.shape[-2]:
            larger = states.new_empty(*states.shape[:-2], end + self.ROOM, states.shape[-1])
            larger[..., :length, :] = buffer[..., :length, :]
            buffer = larger
        buffer[..., length:end, :] = states
        return buffer

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self._key_buffer[..., :length, :], self._value_buffer[..., :length, :]
        self.keys, self.values = keys, values
        return keys, values


class CachedModel:
    """A Hugging Face causal language model, called with a cache for the logits of the last position only.

    Args:
        lm: the model, or a peft wrapper around it (its adapters stay in force).

    Raises:
        ValueError: the model's forward takes no key-value cache.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm: Any = unwrapped(lm)
        accepted = inspect.signature(self.lm.forward).parameters
        caches = [name for name in ("cache", "past_key_values") if name in accepted]  # until transformers 5.23
        if not caches:
            raise ValueError(f"HFEngine cannot generate with {type(self.lm).__name__}: its forward takes no cache")
        self._cache_argument = caches[0]
        self._takes_positions = "position_ids" in accepted
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    def new_cache(self) -> DynamicCache:
        """An empty cache; sliding-window and recurrent layers keep the layer class their architecture asks for."""
        cache = DynamicCache(config=self.lm.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        return cache

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits ``[N, V]`` of the token after ``ids [N, Q]``, which are appended to the cache.

        Args:
            ids: the new tokens.
            mask: ``[N, cached + Q]`` bool, false on padding; ``None`` where nothing is padded.
            positions: ``[N, Q]`` positions of the new tokens, counted from the first real token of their row.
            cache: everything before ``ids``.
        """
        inputs = {"attention_mask": mask, self._cache_argument: cache, **self._options}
        if self._takes_positions:
            inputs["position_ids"] = positions
        return self.lm(input_ids=ids, **inputs).logits[:, -1]
