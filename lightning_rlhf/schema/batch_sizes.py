"""Numbers of sequences, minibatches and updates of a run, printed once before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_rlhf.schema.keys import get
from lightning_rlhf.settings import PPOSettings, SettingError


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of one iteration and of the whole run."""

    prompts: int
    samples: int
    iterations: int
    epochs: int
    minibatch_size: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def minibatches(self) -> int:
        return math.ceil(self.sequences / self.minibatch_size)

    def __str__(self) -> str:
        last = self.sequences - (self.minibatches - 1) * self.minibatch_size
        smaller = "" if last == self.minibatch_size else f" (the last one has {last})"
        updates = self.epochs * self.minibatches
        rows = [
            ("sequences", f"{self.prompts} prompts x {self.samples} samples = {self.sequences} per iteration"),
            ("minibatches", f"{self.sequences} / {self.minibatch_size} = {self.minibatches} per epoch{smaller}"),
            ("updates", f"{self.epochs} epochs x {self.minibatches} minibatches = {updates} per iteration"),
            (
                "whole run",
                f"{self.iterations} iterations: {self.iterations * self.sequences:,} sequences, "
                f"{self.iterations * updates:,} updates",
            ),
        ]
        return "\n".join(f"  {name:<12} {text}" for name, text in rows)


def batch_sizes_of(config: Mapping[str, Any]) -> BatchSizes | None:
    """The batch sizes; ``None`` if a number is missing or not a whole number (:func:`.checks.numbers` reports that)."""
    values = [get(config, key) for key in ("data.prompts_per_iteration", "rollout.samples", "iterations")]
    settings = settings_of(config)
    if settings is None or not all(isinstance(value, int) and value > 0 for value in values):
        return None
    prompts, samples, iterations = values
    return BatchSizes(prompts, samples, iterations, settings.update.epochs, settings.update.minibatch_size)


def settings_of(config: Mapping[str, Any]) -> PPOSettings | None:
    """The module's settings, or ``None`` if a block is invalid (:func:`.checks.module_settings` reports that)."""
    try:
        return PPOSettings.from_blocks(
            **{field.name: get(config, f"module.{field.name}") for field in fields(PPOSettings)}
        )
    except SettingError:
        return None
