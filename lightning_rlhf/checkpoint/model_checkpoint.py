"""Lightning's own checkpoint callback, whose triggers do not count iterations here."""

from __future__ import annotations

from collections.abc import Iterable

from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn


def warn_about_model_checkpoint(callbacks: Iterable[Callback]) -> list[str]:
    """Warn about every ``ModelCheckpoint`` whose trigger does not count iterations here; returns the warnings."""
    instead = "use lightning_rlhf.checkpoint.IterationCheckpoint(every_n_iterations=...)"
    warnings = []
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        every, interval = callback._every_n_train_steps, callback._train_time_interval
        if interval is not None:
            text = f"train_time_interval={interval} is ignored under manual optimisation: it saves nothing"
        elif every > 1:
            text = (
                f"every_n_train_steps={every} counts optimiser steps, several per iteration, and saves only where an "
                f"iteration happens to end on a multiple of {every}; when PPO epochs end early that may be never"
            )
        elif every == 0:
            text = "it saves at the end of an epoch, and the whole run is one epoch: a run that dies leaves nothing"
        else:
            continue
        warnings.append(f"ModelCheckpoint: {text}; {instead}")
        rank_zero_warn(warnings[-1])
    return warnings
