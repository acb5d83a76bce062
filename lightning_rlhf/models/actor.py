"""The policy: log-probabilities and entropy of response tokens from any Hugging Face causal language model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.functional.logprobs import EntropyMode, response_hidden, token_logprobs
from lightning_rlhf.models.loading import isolated_rng
from lightning_rlhf.models.saving import exported_generation_config, exported_tokenizer
from lightning_rlhf.models.weights import checkpoint_weights


class ActorOutput(NamedTuple):
    """What one forward pass of the actor returns; column ``t`` speaks of response token ``t``.

    A tuple, so that wrappers which hook on a module's outputs (FSDP2) find the tensors.
    """

    logprobs: Tensor
    """``[B, R]`` float32, nats."""
    entropy: Tensor | None
    """``[B, R]`` float32, nats."""
    hidden: Tensor | None
    """``[B, R + 1, H]``, the state in which token ``t`` was chosen; last column: the state after the last token."""


class OutputHead(NamedTuple):
    """How an architecture turns hidden states into logits: ``scale * softcap(hidden @ weight.T + bias)``."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


class Actor(nn.Module):
    """A causal language model that scores responses without ever building ``[B, T, V]``."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_length: int,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        with_hidden: bool = False,
    ) -> ActorOutput:
        """Score the last ``response_length`` columns given everything before them.

        Args:
            input_ids: ``[B, T]`` int64, prompts padded on the left, responses on the right.
            attention_mask: ``[B, T]`` bool, true on tokens. Positions come from it, so padding never matters.
            response_length: ``R``, the number of response columns.
            temperature: Divides the logits.
            entropy: ``none``, ``detached`` (as a metric) or ``gradient``.
            with_hidden: Also return the hidden states, for a value head on this trunk.
        """
        hidden = encode(backbone(self.lm), input_ids, attention_mask, response_length)
        head = output_head(self.lm)
        logprobs, entropies = token_logprobs(
            hidden[:, :response_length],
            head.weight,
            input_ids[:, -response_length:],
            bias=head.bias,
            temperature=temperature / head.scale,
            softcap=head.softcap,
            entropy=entropy,
        )
        return ActorOutput(logprobs, entropies, hidden if with_hidden else None)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """``[B, R + 1, H]``, what :meth:`forward` gives ``with_hidden`` but without scoring anything."""
        return encode(backbone(self.lm), input_ids, attention_mask, response_length)

    def export_state_dict(self) -> dict[str, Tensor]:
        """Weights under their Hugging Face names, for a rollout engine or an export.

        Without LoRA these are the live weights, not copies. LoRA is merged out of place: the product is added in
        float32 and cast once, and neither base weights nor adapter change.
        """
        return dict(checkpoint_weights(self.lm))

    def save_pretrained(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, LoRA merged (safetensors)."""
        with torch.device("meta"):
            plain = type(self.lm)(copy.deepcopy(self.lm.config))
        plain.load_state_dict(self.export_state_dict(), assign=True)
        plain.generation_config = exported_generation_config(self.lm, tokenizer)  # type: ignore[assignment]
        plain.save_pretrained(folder)
        exported_tokenizer(tokenizer).save_pretrained(str(folder))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Actor:
        return keep_dtype(self, super()._apply, fn, recurse, derived_buffers(self))


# --- the backbone ------------------------------------------------------------------------------------------------


def backbone(lm: PreTrainedModel) -> nn.Module:
    """The model without its output head.

    Raises:
        ValueError: The architecture does not separate the two.
    """
    body = lm.base_model
    if body is lm:
        raise ValueError(f"model architecture {type(lm).__name__} is not supported: no backbone below its head")
    return body


def encode(body: nn.Module, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
    """Hidden states ``[B, R + 1, H]`` of the response: those in which each token was chosen, and the last one."""
    if not 0 < response_length < input_ids.shape[1]:
        raise ValueError(
            f"response_length = {response_length} must be at least 1 and leave a prompt in {input_ids.shape[1]} columns"
        )
    inputs: dict[str, Any] = {"attention_mask": attention_mask.long(), "use_cache": False, "return_dict": True}
    if _takes_positions(type(body)):
        inputs["position_ids"] = position_ids(attention_mask)
    return response_hidden(body(input_ids=input_ids, **inputs).last_hidden_state, response_length)


def position_ids(attention_mask: Tensor) -> Tensor:
    """``[B, T]`` int64: 0, 1, 2, ... from the first real token on, whatever the padding before it."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)


def _takes_positions(architecture: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(architecture.forward).parameters


# --- the output head ---------------------------------------------------------------------------------------------


def output_head(lm: PreTrainedModel) -> OutputHead:
    """Weight, bias, scale and soft cap that lead from hidden states to logits.

    Cohere multiplies the logits, Granite divides them, Gemma and others cap them: ``c * tanh(m * z / c)``, which
    is ``m`` times a cap at ``c / m``, so the multiplier ``m`` can always be taken outside, into the temperature.
    """
    config = lm.config.get_text_config()
    layer = lm.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model architecture {type(lm).__name__} is not supported: it has no output embedding")
    multiplier, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    scale = _number(multiplier) / _number(divisor)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(layer.weight, getattr(layer, "bias", None), scale, softcap / scale if softcap else None)


def _number(setting: Any) -> float:
    """1 if a scale is unset, or a word as in MPT; :func:`verify_head` detects it if that is wrong."""
    return float(setting) if isinstance(setting, (int, float)) and setting else 1.0


@torch.no_grad()
def verify_head(lm: PreTrainedModel, tolerance: float = 1e-3) -> None:
    """Refuse an architecture that this module would score wrongly, before anything is trained on it.

    A few random tokens are scored in three ways that have to agree with the model's own logits: through
    :class:`Actor`, with padding on the left, and in training mode.

    Args:
        lm: The model; modes and random state are left as they were.
        tolerance: Largest difference of a log-probability, in nats. In low precision the rounding of the model's
            own logits is added to it.

    Raises:
        ValueError: Naming the architecture and what differs, or the weights that are not finite.
    """
    length, padding = 11, 5
    weight = output_head(lm).weight
    device = weight.device
    ids = torch.randint(weight.shape[0], (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    padded = torch.cat([ids[:, :1].expand(1, padding), ids], dim=1)
    real = torch.arange(length + padding, device=device)[None] >= padding
    actor = Actor(lm)

    def score(row: Tensor, mask: Tensor) -> Tensor:
        return actor(row, mask, length - 1).logprobs[0]

    with training_mode(lm, False):
        logits = lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found = {"its logits are not head(hidden)": score(ids, torch.ones_like(ids, dtype=torch.bool))}
        found["padding on the left changes them"] = score(padded, real)
    with training_mode(lm, True), isolated_rng(0):
        found["training mode changes them"] = score(ids, torch.ones_like(ids, dtype=torch.bool))

    if not bool(logits.isfinite().all()):
        damaged = [name for name, parameter in lm.named_parameters() if not bool(parameter.isfinite().all())]
        cause = f"{damaged[0]} holds NaN or infinite weights" if damaged else f"they overflow in {lm.dtype}"
        raise ValueError(f"the model's logits are not finite: {cause}")
    allowed = tolerance + torch.finfo(lm.dtype).eps * logits.abs().max().item()
    for reason, logprobs in found.items():
        difference = (logprobs - expected).abs().max().item()
        if not difference <= allowed:
            raise ValueError(
                f"model architecture {type(lm).__name__} is not supported: log-probabilities differ by "
                f"{difference:.3g} nats from the model's own ({allowed:.3g} allowed): {reason}"
            )


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode, and every submodule back into its own afterwards."""
    before = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode


# --- precision ---------------------------------------------------------------------------------------------------

Owned = tuple[nn.Module, str, Tensor]
"""A tensor with its owner: module, attribute name, tensor."""


def derived_buffers(module: nn.Module) -> list[Owned]:
    """Floating-point buffers that are not in the state dict, such as rotary frequencies."""
    return [
        (owner, name, tensor)
        for owner in module.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None and tensor.is_floating_point() and name in owner._non_persistent_buffers_set
    ]


def keep_dtype(
    module: Any, apply: Callable[..., Any], fn: Callable[..., Tensor], recurse: bool, kept: list[Owned]
) -> Any:
    """Run ``nn.Module._apply`` so that the ``kept`` tensors move to a new device but keep their precision.

    ``module.to(torch.bfloat16)``, which precision "bf16-true" uses, would round rotary frequencies as well: at
    position 1000 the angles would be off by radians. ``from_pretrained(dtype=...)`` keeps them in float32 too.
    """
    before = [(owner, name, tensor.data) for owner, name, tensor in kept]
    apply(fn, recurse)
    for owner, name, tensor in before:
        current = getattr(owner, name)
        if current.dtype != tensor.dtype:
            restored = tensor.to(current.device)
            if isinstance(current, nn.Parameter):
                current.data = restored
            else:
                setattr(owner, name, restored)
    return module
