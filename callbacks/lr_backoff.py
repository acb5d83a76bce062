"""Lower the learning rate of a run whose epochs keep being ended early."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import UpdateStats
from lightning_rlhf.module import ActorCriticModule


class LRBackoff(RLHFCallback):
    """Owner of the knob ``lr_scale``, which multiplies every group's learning rate.

    An iteration counts as broken if a callback rolled it back or ended its epochs after they had begun; an iteration
    without training (no signal, nothing measured) is ignored. An update that the next iteration undoes, because the
    effect of its last step shows only in the next samples, counts as broken as well. List this callback after those
    that roll back or end epochs: it reads their decisions.

    Args:
        patience: broken iterations in a row after which the scale is multiplied by ``factor``.
        factor: below 1.
        recovery: the scale grows by this factor in every iteration that was not broken, up to 1.
        minimum: lower bound of the scale.
    """

    def __init__(self, patience: int = 3, factor: float = 0.5, recovery: float = 1.05, minimum: float = 0.01) -> None:
        bounded("lr_backoff", at_least=1, whole=True, patience=patience)
        bounded("lr_backoff", above=0, below=1, factor=factor)
        bounded("lr_backoff", at_least=1, recovery=recovery)
        bounded("lr_backoff", above=0, at_most=1, minimum=minimum)
        self.patience, self.factor, self.recovery, self.minimum = patience, factor, recovery, minimum
        self.broken = 0
        self.before = 0
        """``broken`` as it was before the last unbroken iteration, in case the next one undoes that iteration."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.control.own("lr_scale", type(self).__name__)  # type: ignore[union-attr, operator]

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        control, name = module.control, type(self).__name__
        verbs = {decision.verb for decision in control.decisions}
        scale = control.knobs["lr_scale"].value
        undone = "rollback" in verbs and stats.epochs_used == 0
        if stats.epochs_used == 0 and not undone:
            return
        if not verbs & {"rollback", "stop_epochs"}:
            self.before, self.broken = self.broken, 0
            control.set("lr_scale", min(scale * self.recovery, 1.0), name)
            return
        if undone:
            self.broken = max(self.broken, self.before)
        self.broken += 1
        if self.broken >= self.patience:
            lower = max(scale * self.factor, self.minimum)
            if lower < scale:
                control.note(
                    "lower_learning_rate",
                    f"epochs broken in {self.broken} iterations in a row: scale {scale:.4g} -> {lower:.4g}",
                )
            control.set("lr_scale", lower, name)
            self.broken = 0
        self.before = 0

    def state_dict(self) -> dict[str, Any]:
        return {"broken": self.broken, "before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.broken = state_dict["broken"]
        self.before = state_dict.get("before", 0)  # absent in earlier releases
