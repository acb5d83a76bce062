"""What a user is told of a run whose responses may not train: it looks like any other, and its weights stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EMPTY = "stability/empty_minibatches"
REJECTING = ("rollout_correction", "alp")
"""Blocks of ``module`` that reject tokens."""


class Untrained:
    """Counts iterations in a row in which no minibatch had a token that may train.

    Args:
        patience: such iterations in a row after which the user is told.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.row = 0
        """Such iterations in a row, the last one included."""
        self._empty = 0.0

    def begin(self, module: Any) -> None:
        """Note how many minibatches without a token there were in earlier starts of the run."""
        self._empty = module.control.counts["empty_minibatches"]

    def note(self, iteration: int, numbers: Mapping[str, Any], module: Any) -> str | None:
        """The text for the user, if this iteration is the one after which there is one.

        Steps that callbacks skip, or that are not finite, are told where that is decided, and are not counted here.

        Args:
            iteration: counted from 1.
            numbers: metrics of the iteration.
            module: whose safety filter and settings say why.
        """
        empty = float(numbers.get(EMPTY, self._empty))
        nothing = empty > self._empty and not any(float(numbers[f"ppo/{n}"]) for n in ("updates", "steps_skipped"))
        self._empty, self.row = empty, self.row + 1 if nothing else 0
        if self.row != self.patience:
            return None
        which = f"iterations {iteration - self.row + 1} to {iteration}" if self.row > 1 else f"iteration {iteration}"
        said = "no response may train, so no step was taken and the weights stay"
        return f"note: {which}: {said}: {why(numbers, module)}"


def why(numbers: Mapping[str, Any], module: Any) -> str:
    """What left the responses of an iteration out of the loss, as shares, with the keys that decide it."""

    def share(*names: str) -> float:
        return sum(float(numbers.get(name, 0.0)) for name in names)

    parts, rest = [], 1.0
    filtered = module.safety
    if filtered is not None and filtered.settings.action != "penalise" and not filtered.settings.train_replaced:
        unsafe = share(*(f"safety/{kind}_fraction" for kind in ("unsafe", "replaced", "cached")))
        said = "left out as unsafe (module.safety.words, module.safety.patterns, module.safety.classifier)"
        parts, rest = [(unsafe, said)], rest - unsafe
    dropped, settings = share("response/dropped_fraction"), module.settings.termination
    keys = f"module.termination.early = {settings.early}, module.termination.min_tokens = {settings.min_tokens}"
    parts.append((dropped, f"dropped as too short ({keys})"))
    blocks = (module.run_config or {}).get("module", {})
    rejecting = [f"module.{name}" for name in REJECTING if blocks.get(name) is not None] or ["by code of your own"]
    # A response may be unsafe and early: less than nothing is left then.
    parts.append((rest - dropped, f"rejected ({' or '.join(rejecting)})"))
    return ", ".join(f"{part:.0%} {said}" for part, said in parts if part > 1e-6)
