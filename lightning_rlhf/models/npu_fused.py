"""Layers of a Hugging Face decoder computed by torch-npu's fused operators: RMSNorm, SwiGLU, attention.

A layer is replaced only if its own forward pass gives the operator's result on a test input; its parameters keep their
names. On other devices a replaced layer computes as before: a model is checked on the CPU before it moves to the NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

ATTENTION = "npu_fusion"
"""Name under which the attention is registered in transformers."""
NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that change its result and that the fused operator lacks."""


def is_installed() -> bool:
    """Whether torch-npu, the package of the operators, is installed."""
    return importlib.util.find_spec("torch_npu") is not None


def fuse(lm: PreTrainedModel) -> dict[str, int]:
    """Replace all layers that the operators can compute, in place.

    Args:
        lm: any Hugging Face decoder with its weights loaded; copies made of it afterwards have the fused layers, too.

    Returns:
        How many layers each operator computes now: ``rms_norm``, ``swiglu``, ``attention``.

    Raises:
        ValueError: torch-npu is missing, or the model has no layer for any of its operators.
    """
    if not is_installed():
        raise ValueError(
            "model.policy.npu_fused = True is not allowed: the operators are those of torch-npu, which is not installed"
        )
    counts = {"rms_norm": 0, "swiglu": 0, "attention": _fuse_attention(lm)}
    for layer in lm.modules():
        if _is_rms_norm(layer):
            layer.__class__ = _derived(type(layer), _rms_norm)
            counts["rms_norm"] += 1
        elif _is_swiglu(layer):
            layer.__class__ = _derived(type(layer), _swiglu)
            counts["swiglu"] += 1
    if not any(counts.values()):
        raise ValueError(
            f"model.policy.npu_fused = True is not allowed: {type(lm).__name__} has no RMSNorm, no SwiGLU and no "
            "attention that torch-npu's operators compute; set it to false"
        )
    rank_zero_info("npu_fused: " + ", ".join(f"{name} in {count} layers" for name, count in counts.items()))
    return counts


def _runs_there(tensor: Tensor) -> bool:
    return tensor.device.type == "npu"


def _operators() -> Any:
    return importlib.import_module("torch_npu")


def _derived(kind: type[nn.Module], forward: Callable[[nn.Module, Tensor], Tensor]) -> type[nn.Module]:
    """A class with a fused ``forward`` on the NPU; the parent's elsewhere."""

    def fused_forward(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x) if _runs_there(x) else kind.forward(self, x)

    return type(f"NPU{kind.__name__}", (kind,), {"forward": fused_forward, "__module__": __name__})


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


def _rms_norm(layer: Any, x: Tensor) -> Tensor:
    """``weight * x / rms(x)``; the operator wants one dtype: the wider of the two, which the layer returns as well."""
    dtype = torch.promote_types(x.dtype, layer.weight.dtype)
    return _operators().npu_rms_norm(x.to(dtype), layer.weight.to(dtype), epsilon=_epsilon(layer))[0]


def _epsilon(layer: Any) -> float | None:
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def _is_rms_norm(layer: Any) -> bool:
    weight, epsilon = getattr(layer, "weight", None), _epsilon(layer)
    if "RMSNorm" not in type(layer).__name__ or not isinstance(weight, Tensor) or weight.ndim != 1 or not epsilon:
        return False
    x = _probe(weight)
    expected = weight.float() * x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return _agree(layer, x, expected)


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


def _swiglu(layer: Any, x: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))``."""
    both = torch.cat([layer.gate_proj(x), layer.up_proj(x)], dim=-1)
    return layer.down_proj(_operators().npu_swiglu(both, dim=-1))


def _is_swiglu(layer: Any) -> bool:
    parts = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return False
    gate, up, down = parts
    x = _probe(gate.weight)  # type: ignore[union-attr]
    with torch.no_grad():
        expected = down(nn.functional.silu(gate(x)) * up(x))  # type: ignore[misc]
    return _agree(layer, x, expected)


def _probe(weight: Tensor) -> Tensor:
    """A test input ``[1, 1, H]`` for a layer with this weight."""
    numbers = torch.randn(1, 1, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    return numbers.to(weight.device, weight.dtype)


@torch.no_grad()
def _agree(layer: nn.Module, x: Tensor, expected: Tensor) -> bool:
    """Whether the layer's result is the expected one, up to the rounding of its dtype."""
    try:
        result = layer(x)
    except (TypeError, RuntimeError):
        return False  # it takes other arguments: a different layer with a similar name
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    tolerance = 8 * torch.finfo(x.dtype).eps
    return torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


# --- attention -------------------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers expects.

    Args:
        module: the attention layer.
        query: ``[B, heads, T, D]``.
        key, value: ``[B, key-value heads, S, D]``; the operator itself shares them among groups of heads.
        attention_mask: ``[B, 1, T, S]`` bool, true where a key is seen; may be ``None`` where ``T`` is 1.
        dropout: probability of dropping a weight; 0 in reinforcement learning.
        scaling: of the scores; ``None`` is ``D ** -0.5``.

    Returns:
        ``[B, T, heads, D]``, and no attention weights.

    Raises:
        ValueError: an argument that the operator does not have, or a mask that is not bool.
    """
    odd = [name for name in NOT_COMPUTED if kwargs.get(name) is not None]
    if query.shape[2] > 1 and (attention_mask is None or attention_mask.dtype != torch.bool):
        odd.append("a mask of its own")
    if odd:
        raise ValueError(f"model.policy.npu_fused: {type(module).__name__} uses {odd[0]}, unknown to the operator")
    # Not for decoding with a KV cache: the operator's documentation names training only.
    if not _runs_there(query) or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = _operators().npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "BNSD",
        atten_mask=None if attention_mask is None else ~attention_mask,  # there true means masked
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        keep_prob=1.0 - dropout,
        inner_precise=2,  # padding on the left: rows without a visible key must stay finite
    )[0]
    return output.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of sdpa, always as a tensor: the operator needs it for causal attention, too."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


@torch.no_grad()
def _fuse_attention(lm: PreTrainedModel) -> int:
    """Switch the model to :func:`attention`; returns the number of layers, 0 if the model is unchanged."""
    layers: list[nn.Module] = []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        layers.append(module)
        return attention(module, *args, **kwargs)

    before, modes = lm.config._attn_implementation, [(layer, layer.training) for layer in lm.modules()]
    AttentionMaskInterface.register(ATTENTION, _mask)
    AttentionInterface.register(ATTENTION, counted)
    ids = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    try:
        lm.set_attn_implementation(ATTENTION)
        lm.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except ValueError:
        layers.clear()  # attention cannot be replaced, or the operator does not compute it
    finally:
        AttentionInterface.register(ATTENTION, attention)
        for layer, mode in modes:
            layer.training = mode
    if not layers:
        lm.set_attn_implementation(before)
    return len(layers)
