"""The monitored metric of a checkpoint: its value in that iteration, and whether it is still to be measured."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.metrics.monitored import misspelt


def evaluation_follows(trainer: Trainer) -> bool:
    """Whether Lightning evaluates after this batch, as far as can be known at ``on_train_batch_end``."""
    loop: Any = trainer.fit_loop.epoch_loop
    return loop._should_check_val_fx(trainer.fit_loop._data_fetcher) and sum(loop.val_loop.max_batches) > 0


class Monitored:
    """The value of a metric in the current iteration.

    Lightning's ``callback_metrics`` keeps the value logged last, which may be of an earlier iteration and so of other
    weights.

    Args:
        name: of the metric; ``None``: there is never a value.

    Attributes:
        value: logged in the iteration that has just ended; ``None`` if none was logged, or it was NaN.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.value: float | None = None
        self._former: Tensor | None = None
        self._seen = self._warned = self._evaluated = False

    def warn_if_misspelt(self, module: LightningModule) -> None:
        """Warn, before anything is trained, of a name that no metric of the kit has but one nearly has."""
        if self.name is None:
            return
        terms = getattr(getattr(module, "reward", None), "terms", ())
        if near := misspelt(self.name, terms):
            rank_zero_warn(
                f"callbacks.checkpoint.monitor = {self.name!r} is no metric of the kit; did you mean {near}? "
                "A metric of your own counts as soon as it is logged."
            )

    def begin(self, trainer: Trainer) -> None:
        """A new iteration begins: a value logged until now is not its own."""
        self.value = None
        if self.name is not None:
            results: Any = trainer._results
            for metric in results.values():
                if metric.meta.name == self.name and not metric.meta.on_epoch:
                    metric.reset()
            self._former = trainer.callback_metrics.pop(self.name, self._former)

    def end(self, trainer: Trainer, *, evaluated: bool) -> None:
        """The iteration has logged all its metrics, including those of its evaluation if there was one."""
        self._evaluated |= evaluated
        if self.name is None:
            return
        if self.name in trainer.callback_metrics:
            number = float(trainer.callback_metrics[self.name])
            self.value, self._seen = None if math.isnan(number) else number, True
        elif self._former is not None:
            trainer.callback_metrics[self.name] = self._former  # other readers expect the value logged last

    def warn_if_unknown(self, trainer: Trainer) -> None:
        """Warn once that the metric is not logged, as soon as that is certain."""
        if self.name is None or self._seen or self._warned or (not self._evaluated and _is_evaluated(trainer)):
            return
        near = get_close_matches(self.name, list(trainer.callback_metrics), n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        begin = self.name.rpartition("/")[0]
        alike = [name for name in sorted(trainer.callback_metrics) if name.rpartition("/")[0] == begin]
        seen = ", ".join(alike) if alike else f"nothing in {begin}/ (docs/metrics.md has all names)"
        rank_zero_warn(f"callbacks.checkpoint.monitor = {self.name!r} is not logged; {guess}logged: {seen}")
        self._warned = True


def _is_evaluated(trainer: Trainer) -> bool:
    """Whether the run evaluates during training at all."""
    interval: Any = trainer.val_check_batch
    if not trainer.enable_validation or sum(trainer.fit_loop.epoch_loop.val_loop.max_batches) == 0:
        return False
    return interval is None or interval <= trainer.num_training_batches
