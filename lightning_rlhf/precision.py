"""Replaces or refuses low precisions that the device has no arithmetic for, before anything is built.

A CPU without bfloat16 instructions still computes in it, by conversion: a matrix product took 55 times as long as in
float32. Nothing fails, but a run of minutes takes a day.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rlhf.accelerators import device as devices
from lightning_rlhf.schema import ConfigError, Problem, get

KEY = "unsupported_precision"
"""Configuration key: ``replace`` or ``refuse``."""

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

TRAINER = {
    "bf16-mixed": (torch.bfloat16, ["32-true"]),
    "bf16": (torch.bfloat16, ["32-true"]),
    "bf16-true": (torch.bfloat16, ["32-true"]),
    # Weights stay float32 under autocast, so bfloat16 loses no stored digits.
    "16-mixed": (torch.float16, ["bf16-mixed", "32-true"]),
    "16": (torch.float16, ["bf16-mixed", "32-true"]),
    # bfloat16 would round weights of float16; float32 holds both exactly.
    "16-true": (torch.float16, ["32-true"]),
}
"""Values of ``trainer.precision`` that compute in a half precision, and what may take their place, best first."""


@dataclass(frozen=True)
class Replaced:
    """One value of the configuration that the device cannot compute in.

    Attributes:
        key: dotted, such as ``trainer.precision``.
        value: as configured.
        use: what is used in its place.
        device: the device of the computation.
        name: the arithmetic that is missing.
    """

    key: str
    value: Any
    use: str
    device: torch.device
    name: str

    def __str__(self) -> str:
        kind = "CPU" if self.device.type == "cpu" else f"device ({self.device.type})"
        return (
            f"{self.key} = {self.value} became {self.use}: this {kind} has no {self.name} arithmetic and would be far "
            f"slower by converting ({KEY}=refuse ends the run instead)"
        )


def fit(config: dict[str, Any]) -> tuple[dict[str, Any], list[Replaced]]:
    """The configuration with precisions that this machine has arithmetic for.

    Checks ``trainer.precision``, ``model.source.dtype``, ``rollout.dtype`` and every ``dtype`` of a reward.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them; not changed.

    Returns:
        The configuration to build from, and what was replaced in it.

    Raises:
        ConfigError: something would have to be replaced and ``unsupported_precision`` is ``refuse``.
    """
    found = [*_of_trainer(config), *_of_weights(config)]
    if found and config.get(KEY, "replace") == "refuse":
        problems = [
            Problem(
                each.key,
                each.value,
                f"{each.use}, as this machine ({each.device.type}) has no {each.name} arithmetic; "
                f"{KEY}=replace does that by itself",
            )
            for each in found
        ]
        raise ConfigError(problems)
    if found:
        config = copy.deepcopy(config)
    for each in found:
        block, _, name = each.key.rpartition(".")
        _block(config, block)[name] = each.use
    return config, found


def fit_dtype(key: str, value: str, device: torch.device | None = None) -> Replaced | None:
    """The replacement of one ``dtype``; ``None`` if ``device`` (by default the accelerator) computes in it.

    Args:
        key: dotted key of the value.
        value: ``float32``, ``bfloat16``, ``float16``, ``auto``, ...
        device: device that computes; ``None`` for the accelerator, or the CPU if there is none.
    """
    device = device or devices.current()
    if value not in HALVES or devices.computes_in(device, HALVES[value]):
        return None
    return Replaced(key, value, "float32", device, value)


def _of_trainer(config: Mapping[str, Any]) -> Iterator[Replaced]:
    """The Trainer's precision. Lightning itself uses bf16 for 16-mixed on any CPU, supported or not."""
    value = get(config, "trainer.precision")
    if str(value) not in TRAINER:
        return
    device = device_of(config)
    dtype, others = TRAINER[str(value)]
    scaled = "mixed" in str(value) or str(value) == "16"
    if devices.computes_in(device, dtype) and not (device.type == "cpu" and dtype is torch.float16 and scaled):
        return
    use = next(o for o in others if o not in TRAINER or devices.computes_in(device, TRAINER[o][0]))
    yield Replaced("trainer.precision", value, use, device, str(dtype).removeprefix("torch."))


def _of_weights(config: Mapping[str, Any]) -> Iterator[Replaced]:
    of_blocks = {"model.source": device_of(config), "rollout": devices.current()}
    for block, device in of_blocks.items():
        yield from filter(None, [fit_dtype(f"{block}.dtype", str(get(config, f"{block}.dtype")), device)])
    for key, term in _reward_blocks(config.get("reward"), "reward"):
        device = torch.device(str(term.get("device", "cpu")))
        yield from filter(None, [fit_dtype(f"{key}.dtype", str(term["dtype"]), device)])


def _reward_blocks(node: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Blocks with a ``dtype`` below a reward's."""
    if isinstance(node, Mapping):
        if "dtype" in node:
            yield key, node
        for name, value in node.items():
            yield from _reward_blocks(value, f"{key}.{name}")


def device_of(config: Mapping[str, Any]) -> torch.device:
    """The kind of device that ``trainer.accelerator`` computes on."""
    name = get(config, "trainer.accelerator", "auto")
    return devices.CPU if name == "cpu" else devices.current()


def _block(config: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split("."):
        config = config[part]
    return config
