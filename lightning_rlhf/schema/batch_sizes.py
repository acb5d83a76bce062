"""How many sequences, minibatches and updates a run has, printed once before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
