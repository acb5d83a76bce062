"""In a supervised training: the callback that tells the supervisor which stage of which iteration has begun."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.reporting import tell
from lightning_rlhf.supervise import files
from lightning_rlhf.supervise.ending import stacks_on_request
from lightning_rlhf.supervise.files import Beat

log = logging.getLogger(__name__)

AT_LEAST = 1.0
"""Seconds between two beats of the same stage of the same iteration, and between two records of metrics."""
KEPT = 50
"""Decisions of callbacks that are kept for a crash report."""


def heartbeat() -> list[Callback]:
    """The callback for a supervised training; none without a supervisor."""
    folder = files.supervised()
    return [] if folder is None else [Heartbeat(folder)]


class Heartbeat(RLHFCallback):
    """Writes a small file at every stage of an iteration, and one with metrics and decisions at its end, on rank 0.

    A file that cannot be written (a full disk) is no reason to end the training: it is a warning, and the time of the
    last file is the sign of life.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count, self._place, self._since = 0, ("", -1), 0.0
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._warned = False
        self._noted = -AT_LEAST

    def beat(self, trainer: Trainer, module: LightningModule, stage: str, *, training: bool = True) -> None:
        """A stage begins or goes on."""
        if not trainer.is_global_zero:
            return
        iteration, now = _iteration(module), time.monotonic()
        if (stage, iteration) == self._place and now - self._since < AT_LEAST:
            return
        self._place, self._since, self._count = (stage, iteration), now, self._count + 1
        try:
            Beat(iteration, stage, training, time.time(), os.getpid(), self._count).write(self._folder)
        except OSError as error:
            self._warn(error)
            with suppress(OSError):
                os.utime(self._folder / files.BEAT)  # needs no space

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        stacks_on_request(self._folder)

    # --- the stages --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.beat(trainer, module, "start")
        if trainer.is_global_zero:
            self._tell_loggers(trainer, module)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.beat(trainer, module, "iteration")

    def on_rollout_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "rollout")

    def on_rollout_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "rewards and scoring")

    def on_experience_scored(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "advantages")

    def on_experience_ready(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "update")

    def on_minibatch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "update")

    def on_update_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.beat(trainer, module, "new weights for the engine")

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.beat(trainer, module, "end of the iteration")
        self._note(trainer, module, at_once=False)

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.beat(trainer, module, "evaluation", training=_iteration(module) > 0)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.beat(trainer, module, "end")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._note(trainer, module, at_once=True)

    # --- for reports -------------------------------------------------------------------------------------------------

    def _note(self, trainer: Trainer, module: LightningModule, *, at_once: bool) -> None:
        """Keep what a crash report shows; of short iterations not each, unless it has to be ``at_once``."""
        if not trainer.is_global_zero:
            return
        rows = [asdict(decision) for decision in getattr(getattr(module, "control", None), "decisions", [])]
        self._decisions += [row for row in rows if row not in self._decisions]
        if not at_once and time.monotonic() - self._noted < AT_LEAST:
            return
        self._noted = time.monotonic()
        try:
            metrics = _measured(trainer, module)
        except RuntimeError as error:
            if not at_once:
                raise
            log.warning("the last metrics cannot be read for the supervisor: %s", error)  # a device that has failed
            metrics = {}
        content = {"iteration": _iteration(module), "metrics": metrics, "decisions": list(self._decisions)}
        try:
            files.write(self._folder / files.LAST, content)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("nothing can be written for the supervisor, which will know less: %s", error)
        self._warned = True

    def _tell_loggers(self, trainer: Trainer, module: LightningModule) -> None:
        """Tags, reports and one decision for the record of the run: why this attempt began, and what it changed."""
        told = files.read(self._folder / files.ATTEMPT) or {}
        if not told.get("tags"):
            return
        tell(trainer.loggers, "log_tags", told["tags"])
        for report in told.get("reports", []):
            if Path(report).exists():
                tell(trainer.loggers, "log_file", report, "crashes")
        update = getattr(getattr(module, "control", None), "update", 0)
        row = {"verb": "retry", "reason": told["reason"], "iteration": _iteration(module), "update": update}
        tell(trainer.loggers, "log_decisions", [row])


def _measured(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """The newest value of each metric, in one transfer from the device."""
    logged = trainer.callback_metrics
    values = [value.detach().reshape(()).to(module.device, torch.float32) for value in logged.values()]
    return dict(zip(logged, torch.stack(values).tolist() if values else [], strict=True))


def _iteration(module: LightningModule) -> int:
    return int(getattr(getattr(module, "control", None), "iteration", 0))
