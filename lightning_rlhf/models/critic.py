"""Value functions: a head on the actor's trunk, or a backbone of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.models.actor import backbone, derived_buffers, encode, keep_dtype


class ValueHead(nn.Module):
    """Linear map from a hidden state to one value, in float32 whatever the precision of the trunk.

    It starts at zero, as in OpenAI's lm-human-preferences and its reproduction (Huang et al. 2024, "The N+
    Implementation Details of RLHF with PPO"): the first values are exactly 0, so the first advantages are plain
    returns and not returns minus noise of the size of the hidden states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``[...]`` float32 of hidden states ``[..., H]`` in any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight, self.bias).squeeze(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueHead:
        kept: list[tuple[nn.Module, str, Tensor]] = [(self, "weight", self.weight), (self, "bias", self.bias)]
        return keep_dtype(self, super()._apply, fn, recurse, kept)


class SharedCritic(nn.Module):
    """A value head on the actor's hidden states; its gradient reaches the actor's trunk."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.head = ValueHead(_width(lm))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``[B, R + 1]`` float32 of the actor's hidden states ``[B, R + 1, H]``.

        Column ``t`` is the value of the state in which token ``t`` was chosen; the last one that after the last token.
        """
        return self.head(hidden)


class SeparateCritic(nn.Module):
    """A backbone of its own, started from a copy of the actor's, with a value head and no output embedding.

    With LoRA the copy has its own trainable adapter on its own frozen weights.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(backbone(lm))
        self.head = ValueHead(_width(lm))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """Values ``[B, R + 1]`` float32.

        Column ``t`` is the value of the state in which token ``t`` was chosen; the last one that after the last token.

        Args:
            input_ids: ``[B, T]`` int64, prompts padded on the left, responses on the right.
            attention_mask: ``[B, T]`` bool, true on tokens.
            response_length: ``R``.
        """
        return self.head(encode(self.backbone, input_ids, attention_mask, response_length))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SeparateCritic:
        return keep_dtype(self, super()._apply, fn, recurse, derived_buffers(self))


def _width(lm: PreTrainedModel) -> int:
    """Size of the hidden states the output head reads."""
    return lm.get_output_embeddings().weight.shape[-1]
