"""Settings of adaptive layerwise perturbation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_rlhf.bounds import bounded, is_number
from lightning_rlhf.models.perturbation import BITS, Granularity
from lightning_rlhf.settings import SettingError, build

BLOCK = "module.alp"
RatioMode = Literal["unified", "decoupled"]


@dataclass(frozen=True)
class RouterSettings:
    """Noise on the routers of a mixture of experts."""

    init_sigma: float = 1e-5
    """Standard deviation on a router logit to start from; multiplied by the expert's utilisation over its target."""
    balance: float = 0.01
    """lambda, the weight of sum (utilisation - target)^2 in the loss."""
    target: float | None = None
    """Share of the router's probability each expert should have; null: one over their number."""

    def __post_init__(self) -> None:
        block = f"{BLOCK}.router"
        for name in ("init_sigma", "balance"):
            if not (is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise SettingError(f"{block}.{name}", getattr(self, name), "a number >= 0")
        if self.target is not None and not (is_number(self.target) and 0 < self.target <= 1):
            raise SettingError(f"{block}.target", self.target, "a number in (0, 1], or null")


@dataclass(frozen=True)
class ALPSettings:
    """Everything about the noise and how it is learned; see docs/alp.md."""

    ratio: RatioMode = "unified"
    """unified: perturbed current / engine; decoupled: perturbed current / trainer before the update."""
    init_sigma: float = 1e-4
    """Standard deviation to start from, in units of the hidden states; 0 stays 0."""
    sigma_bounds: tuple[float, float] = (1e-6, 1e-1)
    """Lower and upper bound of sigma."""
    granularity: Granularity = "layer"
    """layer: one sigma per layer; channel: one per layer and hidden unit."""
    layers: str | None = None
    """Dotted name of the list of decoder layers, if it cannot be found automatically; null: search for it."""
    layer_range: tuple[int, int] | None = None
    """First and last layer that are perturbed, counted from 0; null: all."""
    warmup_steps: int = 1000
    """Optimiser steps during which sigma stays as it is."""
    lr: float = 5e-4
    """Learning rate of log sigma."""
    clip_norm: float = 1e-3
    """Limit of the gradient norm of log sigma."""
    max_clip_norm: float = 1e-2
    """How far a high variance of that gradient may raise the limit."""
    variance_limit: float = 1.0
    """Variance of the gradient norm over its squared mean above which the limit rises."""
    kl_limit: float = 0.01
    """KL(old || perturbed current) in nats per token above which the learning rate shrinks."""
    min_lr_factor: float = 0.01
    """Smallest factor on the learning rate."""
    step: float = 0.1
    """Largest change of learning rate and limit from one optimiser step to the next, as a share."""
    smoothing: float = 0.9
    """Weight of the past in the averages of KL and gradient norm, per optimiser step."""
    quantise_bits: int | None = None
    """8 or 4: hidden states are rounded to that grid after the noise, gradients pass straight through; null: not."""
    compare_every: int = 10
    """Iterations between two comparisons with the plain policy (one forward pass of one micro-batch per epoch)."""
    router: RouterSettings | None = None
    """Noise on the routers of a mixture of experts; null: none."""

    def __post_init__(self) -> None:
        if self.router is not None and not isinstance(self.router, RouterSettings):
            object.__setattr__(self, "router", build(RouterSettings, f"{BLOCK}.router", self.router))
        self._check_words()
        positive = ("lr", "clip_norm", "max_clip_norm", "variance_limit", "kl_limit")
        bounded(BLOCK, above=0, **{name: getattr(self, name) for name in positive})
        bounded(BLOCK, at_least=0, whole=True, warmup_steps=self.warmup_steps)
        bounded(BLOCK, at_least=1, whole=True, compare_every=self.compare_every)
        for name in ("min_lr_factor", "step"):
            if not (is_number(getattr(self, name)) and 0 < getattr(self, name) <= 1):
                raise _refused(name, getattr(self, name), "a number in (0, 1]")
        if not (is_number(self.smoothing) and 0 <= self.smoothing < 1):
            raise _refused("smoothing", self.smoothing, "a number in [0, 1)")
        if self.max_clip_norm < self.clip_norm:
            raise _refused("max_clip_norm", self.max_clip_norm, f"at least clip_norm = {self.clip_norm}")
        self._check_sigma()

    def _check_words(self) -> None:
        for name, allowed in (("ratio", get_args(RatioMode)), ("granularity", get_args(Granularity))):
            if getattr(self, name) not in allowed:
                raise _refused(name, getattr(self, name), f"one of {', '.join(allowed)}")
        if self.layers is not None and not isinstance(self.layers, str):
            raise _refused("layers", self.layers, "a dotted name such as model.decoder.blocks, or null")
        if self.quantise_bits not in (*BITS, None):
            raise _refused("quantise_bits", self.quantise_bits, "8, 4 or null")

    def _check_sigma(self) -> None:
        bounds = self.sigma_bounds
        if not (_is_pair(bounds, is_number) and 0 < bounds[0] < bounds[1]):
            raise _refused("sigma_bounds", bounds, "two numbers > 0, the lower one first")
        object.__setattr__(self, "sigma_bounds", (float(bounds[0]), float(bounds[1])))
        inside = is_number(self.init_sigma) and (self.init_sigma == 0 or bounds[0] <= self.init_sigma <= bounds[1])
        if not inside:
            raise _refused("init_sigma", self.init_sigma, f"0, or a number in sigma_bounds = {list(self.sigma_bounds)}")
        span = self.layer_range
        if span is not None:
            if not (_is_pair(span, lambda n: type(n) is int) and 0 <= span[0] <= span[1]):
                raise _refused("layer_range", span, "two whole numbers, first and last layer, or null")
            object.__setattr__(self, "layer_range", tuple(span))


def alp_settings(block: Mapping[str, Any] | ALPSettings | None) -> ALPSettings | None:
    """Settings from the config block ``module.alp``; ``None`` where it is null.

    Raises:
        SettingError: an unknown key or a value that is not allowed.
    """
    return None if block is None else build(ALPSettings, BLOCK, block)


def _refused(name: str, value: Any, allowed: str) -> SettingError:
    return SettingError(f"{BLOCK}.{name}", value, allowed)


def _is_pair(value: Any, kind: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and all(map(kind, value))
