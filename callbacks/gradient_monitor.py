"""Watch gradient norms against their limits, and stop when they are not finite any more."""

from __future__ import annotations

from typing import Any

from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import MinibatchStats, UpdateStats
from lightning_rlhf.module import ActorCriticModule


class GradientMonitor(RLHFCallback):
    """Averages the gradient norms before clipping, gives advice, and ends runs whose gradients stay non-finite.

    Steps with a non-finite loss or gradient are always skipped by the update itself; this callback ends the run
    when that happens ``max_nonfinite`` times in a row. Logged as ``grad_norm/<group>_average`` and
    ``grad_clipped/<group>_average``.

    Args:
        decay: of the exponential moving averages, per optimiser step.
        max_nonfinite: steps in a row that may be skipped before training stops.
        warn_clipped: warn when this share of recent steps was clipped: lower the learning rate, or look at the
            value targets.
        warn_far_below: warn when the average norm is below this share of the limit: the learning rate may be low.
    """

    def __init__(
        self,
        decay: float = 0.98,
        max_nonfinite: int = 5,
        warn_clipped: float = 0.95,
        warn_far_below: float = 0.01,
    ) -> None:
        bounded("gradient_monitor", at_least=0, below=1, decay=decay)
        bounded("gradient_monitor", at_least=1, whole=True, max_nonfinite=max_nonfinite)
        bounded("gradient_monitor", above=0, at_most=1, warn_clipped=warn_clipped, warn_far_below=warn_far_below)
        self.decay, self.max_nonfinite = decay, max_nonfinite
        self.warn_clipped, self.warn_far_below = warn_clipped, warn_far_below
        self.norms: dict[str, float] = {}
        self.clipped: dict[str, float] = {}
        self.steps = 0
        self.nonfinite = 0
        self._warned: set[tuple[str, str]] = set()

    def on_minibatch_end(self, trainer: Trainer, module: ActorCriticModule, stats: MinibatchStats) -> None:
        if not stats.tokens and not stats.stepped:
            return  # rejected as a whole: there was no gradient
        if not stats.finite:
            self.nonfinite += 1
            if self.nonfinite >= self.max_nonfinite:
                reason = f"loss or gradient not finite in {self.nonfinite} steps in a row"
                module.control.stop_epochs(reason)
                module.control.stop_training(reason, failed=True)
            return
        self.nonfinite = 0
        self.steps += 1
        # The first average is the first value, later ones forget with `decay`.
        keep = min(self.decay, 1.0 - 1.0 / self.steps)
        for name, norm in stats.grad_norms.items():
            self.norms[name] = keep * self.norms.get(name, 0.0) + (1.0 - keep) * norm
            self.clipped[name] = keep * self.clipped.get(name, 0.0) + (1.0 - keep) * float(stats.clipped[name])

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        for name, norm in self.norms.items():
            module.control.report(f"grad_norm/{name}_average", norm)
            module.control.report(f"grad_clipped/{name}_average", self.clipped[name])
        if self.steps * (1.0 - self.decay) < 1.0:
            return  # the averages have not seen a full window yet
        limits = {group["name"]: group["clip_norm"] for group in module.parameter_groups()}
        for name, norm in self.norms.items():
            if self.clipped[name] > self.warn_clipped:
                self._warn(
                    name,
                    "clipped",
                    f"{self.clipped[name]:.0%} of recent {name} steps were clipped: lower "
                    f"module.{name}.lr, or look for outliers in rewards and value targets",
                )
            elif limits[name] is not None and norm < self.warn_far_below * limits[name]:
                self._warn(
                    name,
                    "below",
                    f"the {name} gradient norm averages {norm:.2g}, far under its limit "
                    f"{limits[name]}: module.{name}.lr may be low, or the signal has vanished",
                )

    def _warn(self, group: str, kind: str, text: str) -> None:
        if (group, kind) not in self._warned:
            self._warned.add((group, kind))
            rank_zero_warn(text)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms, "clipped": self.clipped, "steps": self.steps, "nonfinite": self.nonfinite}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.norms, self.clipped = dict(state_dict["norms"]), dict(state_dict["clipped"])
        self.steps, self.nonfinite = state_dict["steps"], state_dict["nonfinite"]
