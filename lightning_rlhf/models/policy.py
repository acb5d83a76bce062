"""One call from a loaded model to actor, critic and reference."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.bounds import bounded
from lightning_rlhf.models.actor import Actor, verify_head
from lightning_rlhf.models.critic import SeparateCritic, SharedCritic
from lightning_rlhf.models.loading import LoadedModel, assert_no_dropout, disable_dropout, isolated_rng
from lightning_rlhf.models.npu_fused import fuse
from lightning_rlhf.models.reference import REFERENCE_ADAPTER, AdapterReference, FrozenReference
from lightning_rlhf.models.weights import POLICY_ADAPTER, lora_layers

CriticKind = Literal["separate", "shared", "none"]
ReferenceKind = Literal["copy", "none"]
LORA_KEYS = ("r", "alpha", "dropout", "target_modules", "adapter")


@dataclass
class Policy:
    """Everything that is trained or compared against, ready for the module."""

    actor: Actor
    critic: SeparateCritic | SharedCritic | None
    reference: FrozenReference | AdapterReference | None
    tokenizer: PreTrainedTokenizerBase
    source: str


def build_policy(
    loaded: LoadedModel,
    *,
    critic: CriticKind = "shared",
    reference: ReferenceKind = "copy",
    lora: Mapping[str, Any] | None = None,
    activation_checkpointing: bool = False,
    npu_fused: bool = False,
    seed: int = 1,
) -> Policy:
    """Build actor, critic and reference from one loaded model.

    Args:
        loaded: Model and tokenizer; the model becomes the actor and is changed in place.
        critic: ``separate`` (a copy of the backbone), ``shared`` (a head on the actor's trunk) or ``none``.
        reference: ``copy`` (a frozen copy; with LoRA the frozen base weights, without another copy) or ``none``.
        lora: ``None`` trains all weights. Otherwise ``r``, ``alpha`` (default ``2 r``) and ``target_modules``
            (names, or ``all-linear``) of a fresh adapter, or ``adapter``, the folder of a trained one to start from.
        activation_checkpointing: Recompute activations in the backward pass, to save memory.
        npu_fused: Compute RMSNorm, SwiGLU and attention by torch-npu's fused operators, see
            :func:`lightning_rlhf.models.npu_fused.fuse`.
        seed: Seed of a fresh adapter. PyTorch's global generator is left as it was.

    Raises:
        ValueError: An unknown setting, or an architecture that cannot be scored exactly.
    """
    _one_of("critic", critic, get_args(CriticKind))
    _one_of("reference", reference, get_args(ReferenceKind))
    if lora is not None:
        lora = {key: value for key, value in lora.items() if value is not None}  # null in a config: left unset
    lm = loaded.lm
    disable_dropout(lm)
    if npu_fused:
        fuse(lm)
    verify_head(lm)
    if lora is not None:
        _add_lora(lm, lora, seed)
    actor = Actor(lm)
    value = SeparateCritic(lm) if critic == "separate" else SharedCritic(lm) if critic == "shared" else None
    frozen: FrozenReference | AdapterReference | None = None
    if reference == "copy" and lora is None:
        frozen = FrozenReference(lm)
    elif reference == "copy":
        trained_before = "adapter" in (lora or {})
        if trained_before:
            _copy_adapter(lm)
        frozen = AdapterReference(actor, REFERENCE_ADAPTER if trained_before else None)
    trained = [part for part in (actor, value) if part is not None]
    for part in trained:
        if activation_checkpointing and not isinstance(part, SharedCritic):
            _checkpoint_activations(part.lm if isinstance(part, Actor) else part.backbone)
        part.train()  # Lightning keeps the mode it finds, and from_pretrained leaves evaluation mode
        assert_no_dropout(part)
    return Policy(actor, value, frozen, loaded.tokenizer, loaded.source)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = get_close_matches(str(value), allowed, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"model.policy.{name} = {value!r} is not allowed: one of {', '.join(allowed)}{hint}")


def _checkpoint_activations(lm: Any) -> None:
    enable = getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)  # the older name
    enable({"use_reentrant": False})


# --- LoRA --------------------------------------------------------------------------------------------------------


def _add_lora(lm: PreTrainedModel, lora: Mapping[str, Any], seed: int) -> None:
    """Put a fresh or a trained adapter called ``policy`` into the model; everything else is frozen."""
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise ValueError(
            'model.policy.lora needs the package peft: pip install "lightning-rlhf[lora]", or set lora to null'
        ) from None
    for key in lora:
        _one_of("lora", key, LORA_KEYS)
    folder = lora.get("adapter")
    config = _fresh_config(lm, lora) if folder is None else _trained_config(folder, lora)
    try:
        with isolated_rng(seed):
            inject_adapter_in_model(config, lm, POLICY_ADAPTER)
    except ValueError as error:
        raise ValueError(f"model.policy.lora = {dict(lora)!r} does not fit {type(lm).__name__}: {error}") from error
    _check_layers(lm, lora)
    adapter = _adapter_parameters(lm, POLICY_ADAPTER)
    if folder is not None:
        _load_adapter(adapter, folder)
    for parameter in adapter.values():
        parameter.data = parameter.data.float()  # small steps would be lost in a low precision


def _fresh_config(lm: PreTrainedModel, lora: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    r, targets = lora.get("r", 16), lora.get("target_modules", "all-linear")
    bounded("model.policy.lora", at_least=1, whole=True, r=r)
    alpha = lora.get("alpha", 2 * r)
    bounded("model.policy.lora", above=0, alpha=alpha)
    if lora.get("dropout", 0.0) != 0:
        raise ValueError(
            f"model.policy.lora.dropout = {lora['dropout']!r} is not allowed: only 0, "
            "or old and current log-probabilities come from different functions"
        )
    return LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
    )


def _trained_config(folder: str, lora: Mapping[str, Any]) -> Any:
    """The configuration of a trained adapter, refusing the kinds that could not be merged or compared exactly."""
    from peft import LoraConfig, PeftConfig

    others = [key for key in lora if key != "adapter"]
    if others:
        raise ValueError(f"model.policy.lora.{others[0]} cannot be set together with lora.adapter, which decides it")
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"model.policy.lora.adapter = {folder!r}: no folder with an adapter_config.json")
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"model.policy.lora.adapter = {folder!r} is of type {config.peft_type}, not LORA")
    unsupported = {
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
        "modules_to_save": bool(config.modules_to_save),
        "init_lora_weights": config.init_lora_weights not in (True, False, "gaussian"),
    }
    for name, is_used in unsupported.items():
        if is_used:
            found = f"{name} = {getattr(config, name)!r}"
            raise ValueError(f"model.policy.lora.adapter = {folder!r}: {found} is not supported, only plain LoRA")
    config.inference_mode = False
    config.lora_dropout = 0.0
    return config


def _check_layers(lm: PreTrainedModel, lora: Mapping[str, Any]) -> None:
    """Only linear layers below the output head can be merged and scored exactly."""
    head = lm.get_output_embeddings()
    for name, layer in lora_layers(lm).items():
        if layer is head or not isinstance(layer.get_base_layer(), (nn.Linear, Conv1D)):
            kind = type(layer.get_base_layer()).__name__
            raise ValueError(
                f"model.policy.lora = {dict(lora)!r} adapts {name} ({kind}): only linear layers below the output head"
            )


def _adapter_parameters(lm: PreTrainedModel, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter, under the names that peft gives them in files."""
    marker = f".{adapter}."
    return {
        name.replace(marker, "."): parameter
        for name, parameter in lm.named_parameters()
        if ".lora_" in name and marker in name
    }


@torch.no_grad()
def _load_adapter(adapter: Mapping[str, Tensor], folder: str) -> None:
    from peft import load_peft_weights

    stored = load_peft_weights(folder, "cpu")
    weights = {key.removeprefix("base_model.model."): tensor for key, tensor in stored.items()}
    odd = sorted(adapter.keys() ^ weights.keys())
    if odd:
        keys = f"{len(odd)} keys, {odd[0]} first"
        raise ValueError(f"model.policy.lora.adapter = {folder!r} does not fit the model: {keys}")
    for name, parameter in adapter.items():
        parameter.copy_(weights[name])


@torch.no_grad()
def _copy_adapter(lm: PreTrainedModel) -> None:
    """A frozen second copy of the adapter ``policy``, called ``reference``."""
    from peft import inject_adapter_in_model

    with isolated_rng(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        config: Any = lm.peft_config[POLICY_ADAPTER]
        inject_adapter_in_model(config, lm, REFERENCE_ADAPTER)
    source = _adapter_parameters(lm, POLICY_ADAPTER)
    for name, parameter in _adapter_parameters(lm, REFERENCE_ADAPTER).items():
        parameter.data = source[name].detach().clone()
    for layer in lora_layers(lm).values():
        layer.set_adapter(POLICY_ADAPTER)  # trains this one, freezes the other
