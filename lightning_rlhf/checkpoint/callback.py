"""Checkpoints that are complete or absent, hold plain data, are counted in iterations and resume bit for bit.

Usable in any LightningModule under manual optimisation, where Lightning's own ``ModelCheckpoint`` counts optimiser
steps and so, if PPO epochs end early, saves at irregular iterations or never.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.bounds import bounded
from lightning_rlhf.checkpoint.capture import Captured, can_capture, iteration_now, weights_are_finite
from lightning_rlhf.checkpoint.files import (
    PARTIAL,
    SET_ASIDE,
    CheckpointError,
    iteration_of,
    not_written,
    partial_of,
    plain,
    put_in_place,
    remove,
    verify,
)
from lightning_rlhf.checkpoint.monitor import Monitored, evaluation_follows
from lightning_rlhf.checkpoint.shards import read_checkpoint
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.distributed.processes import gather_objects
from lightning_rlhf.functional.stats import largest_over_ranks
from lightning_rlhf.interruption import Interrupted, signals
from lightning_rlhf.reporting.loggers import tell


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file beside the target, syncs it, verifies it, then renames it: complete or absent.

    It streams into the file, so a save needs no second copy of the state in memory (Lightning's own writer does).
    Paths with a protocol (``s3://...``) are left to Lightning's writer.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; if that fails, nothing is left behind and an older file of that name is untouched.

        Raises:
            CheckpointError: the content is not plain, or the file could not be written.
        """
        checkpoint = plain(checkpoint)
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        partial = partial_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            verify(partial)
            put_in_place(path)
        except (OSError, RuntimeError) as error:
            # After a failed write PyTorch reports a wrong file position; the real reason is in that error's context.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise not_written(path, cause) from error
        finally:
            remove(partial)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """The content of a file, or of a folder of shards put together."""
        if Path(path).is_dir():
            return read_checkpoint(Path(path))
        return super().load_checkpoint(path, *args, **options)


# --- when to save ----------------------------------------------------------------------------------------------------


class IterationCheckpoint(Checkpoint):
    """Saves ``iteration_000010.ckpt`` every ``every_n_iterations`` training batches, at a stop and at the end.

    One training batch is one iteration, however many optimiser steps it took. The order is: update, its metrics, its
    evaluation if one is due, checkpoint. So the value of ``monitor`` is that of the weights in the file, and
    ``trainer.fit(ckpt_path=...)`` goes on with the next iteration, without repeating or losing an evaluation. The first
    iteration of a run is saved, too, and an evaluated one that is the best so far.
    A failed save ends the run with an error that names the cause: without checkpoints the work would be at risk
    unnoticed.

    With an :class:`~lightning_rlhf.module.ActorCriticModule`, an error or a signal during rollout, reward or scoring
    of an iteration saves the iteration before; after a first SIGINT or SIGTERM
    (:mod:`lightning_rlhf.interruption`) during an update the iteration is finished and saved.

    Args:
        dirpath: folder of the checkpoints, on a local (or mounted) file system.
        every_n_iterations: iterations between two checkpoints.
        keep: number of newest checkpoints that are kept; ``None`` keeps all.
        monitor: metric whose best checkpoint is kept as well; ``None``: none. Only a value that was logged for the
            iteration itself counts.
        mode: whether the largest (``max``) or the smallest (``min``) value of ``monitor`` is best.

    Attributes:
        iteration: training batches done since the run began, resumed parts included.
        last_model_path, best_model_path: the newest checkpoint written; the one with the best monitored value.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_iterations: int = 10,
        keep: int | None = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
    ) -> None:
        bounded("callbacks.checkpoint", at_least=1, whole=True, every_n_iterations=every_n_iterations)
        bounded("callbacks.checkpoint", at_least=1, whole=True, optional=True, keep=keep)
        if mode not in ("min", "max"):
            raise ValueError(f"callbacks.checkpoint.mode = {mode!r} is not allowed: min or max")
        if "://" in str(dirpath):
            raise ValueError(f"callbacks.checkpoint.dirpath = {str(dirpath)!r} is not allowed: a local folder")
        self.dirpath = Path(dirpath).expanduser().absolute()
        self.every_n_iterations, self.keep, self.monitor, self.mode = every_n_iterations, keep, monitor, mode
        self.iteration = 0
        self.last_model_path, self.best_model_path = "", ""
        self.best_model_score: float | None = None
        self._saved = 0
        self._monitored = Monitored(monitor)
        self._looked_at = False
        self._captured: Captured | None = None

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints in the folder, oldest iteration first."""
        return sorted((p for p in self.dirpath.glob("*.ckpt") if iteration_of(p) >= 0), key=iteration_of)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the atomic writer, refuse content that cannot be saved, remove half-written files of a killed run."""
        if not self._looked_at:
            self._monitored.warn_if_misspelt(pl_module)
            self._looked_at = True  # once, although an evaluation may come first, which is a set-up of its own
        if stage != "fit":
            return
        strategy = trainer.strategy
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = AtomicCheckpointIO()
        elif not isinstance(strategy.checkpoint_io, AtomicCheckpointIO):
            raise TypeError(
                f"the trainer has the plugin {type(strategy.checkpoint_io).__name__}, which does not promise whole "
                "files: take it out, or derive it from lightning_rlhf.checkpoint.AtomicCheckpointIO"
            )
        for part in (pl_module, getattr(trainer, "datamodule", None)):
            if part is not None:
                plain(dict(part.hparams), f"{type(part).__name__}.hparams")
        self._begin(iteration_now(pl_module))
        if trainer.is_global_zero:
            for leftover in self.dirpath.glob(f".*{PARTIAL}"):
                remove(leftover)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals().install()  # Lightning has set its own handler
        if trainer.is_global_zero:
            self._set_aside_later()
        self._capture(trainer)
        self._may_stop_at_once(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._monitored.begin(trainer)

    def on_rollout_end(self, trainer: Trainer, *args: Any) -> None:
        self._obey_signal(trainer)

    def on_experience_ready(self, trainer: Trainer, *args: Any) -> None:
        """From here on weights may change: drop the captured state; a signal waits until the iteration is finished."""
        self._obey_signal(trainer)
        self._captured = None
        signals().hold(f"finishing iteration {self.iteration + 1}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.iteration += 1
        if evaluation_follows(trainer):
            self._capture(trainer)  # a failing evaluation must not lose the iteration
        else:
            self._end_iteration(trainer, evaluated=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals().install()  # Lightning sets its own handler at every start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_iteration(trainer, evaluated=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last iteration, which :meth:`on_train_batch_end` could not know to be the last."""
        if self._saved < self.iteration:
            self.save(trainer)
        self._captured = None
        signals().release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of the last iteration, if the weights have not changed since and it is not saved yet."""
        captured, self._captured = self._captured, None
        if captured is None or self._saved >= self.iteration or isinstance(exception, TrainingFailed):
            return
        together = trainer.world_size == 1 or getattr(exception, "on_every_rank", False)
        if captured.needs_all_ranks and not together:
            return  # other ranks wait elsewhere, perhaps for ever, and could not take part
        path = self._path
        try:
            captured.write(trainer, path)
        except CheckpointError as error:
            rank_zero_warn(f"after {type(exception).__name__}: {error}")
            return
        self._note_saved(trainer, path)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Not in state_dict(): Lightning's key for that contains the arguments, and the count must survive other ones.
        checkpoint["iteration"] = self.iteration
        if self.monitor is not None:
            best = checkpoint.setdefault("best_checkpoints", {})
            best[f"{self.mode} {self.monitor}"] = {"score": self.best_model_score, "path": self.best_model_path}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.refuse_uncounted(checkpoint)
        self.iteration = self._saved = checkpoint["iteration"]
        best = checkpoint.get("best_checkpoints", {}).get(f"{self.mode} {self.monitor}")
        if best is not None:
            here = self.dirpath / Path(best["path"]).name  # also after the folder was moved
            self.best_model_score = best["score"]
            self.best_model_path = str(here) if best["path"] and here.exists() else best["path"]

    def refuse_uncounted(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse (:class:`CheckpointError`) a checkpoint that does not say its iteration; changes nothing."""
        if "iteration" not in checkpoint:
            raise CheckpointError("the checkpoint was saved without IterationCheckpoint: it does not say its iteration")

    def _begin(self, iteration: int) -> None:
        """Start a fit of a module that has done this many iterations; the callback may have served another module."""
        self.iteration = self._saved = iteration
        if iteration == 0:
            self.best_model_score, self.best_model_path, self.last_model_path = None, "", ""
            self._monitored = Monitored(self.monitor)

    # --- between iterations ------------------------------------------------------------------------------------------

    def _end_iteration(self, trainer: Trainer, *, evaluated: bool) -> None:
        stop = self._agreed_signal(trainer)
        self._monitored.end(trainer, evaluated=evaluated)
        due = self.iteration == 1 or self.iteration % self.every_n_iterations == 0 or (evaluated and self._is_best)
        if _is_last_iteration(trainer) or stop or due:
            self.save(trainer)
        else:
            self._capture(trainer)
        self._may_stop_at_once(trainer)
        if stop:
            raise Interrupted(stop, on_every_rank=True)

    def _capture(self, trainer: Trainer) -> None:
        self._captured = Captured(trainer) if can_capture(trainer.lightning_module) else None

    def _may_stop_at_once(self, trainer: Trainer) -> None:
        """With one process a signal raises at once; several processes have to agree where to stop."""
        if trainer.world_size == 1 and self._captured is not None:
            signals().release()
        else:
            signals().hold(f"stopping in iteration {self.iteration + 1}")

    def _agreed_signal(self, trainer: Trainer) -> int:
        """The signal that any rank has received, 0 if there was none."""
        device = trainer.strategy.root_device
        return int(largest_over_ranks([float(signals().received)], device)[0])

    def _obey_signal(self, trainer: Trainer) -> None:
        if stop := self._agreed_signal(trainer):
            raise Interrupted(stop, on_every_rank=True)

    # --- saving ------------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self.dirpath / f"iteration_{self.iteration:06d}.ckpt"

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of this iteration, then remove those not to be kept. Called on every rank.

        Raises:
            CheckpointError: on every rank, if the file could not be written, or the weights are not finite.
        """
        path = self._path
        if not weights_are_finite(trainer):
            self._captured = None
            raise CheckpointError(
                f"the weights after iteration {self.iteration} are not finite: no checkpoint of them is written. "
                "Earlier ones are untouched."
            )
        self._note_best(trainer, path)
        failure: CheckpointError | None = None
        try:
            captured = Captured(trainer)
            captured.write(trainer, path)
            self._captured = captured if can_capture(trainer.lightning_module) else None
        except CheckpointError as error:
            failure = error
        # Several processes wait for one another: each must get here, whether or not its own write succeeded.
        messages = gather_objects(str(failure) if failure else None)
        message = next((text for text in messages if text is not None), None)
        if message is not None:
            self._captured = None
            raise failure or CheckpointError(message)
        self._note_saved(trainer, path)

    def _note_saved(self, trainer: Trainer, path: Path) -> None:
        self._saved, self.last_model_path = self.iteration, str(path)
        if trainer.is_global_zero:
            self._remove_old()
            known = [str(p) for p in self.checkpoints]
            tell(trainer.loggers, "log_checkpoints", known, latest=str(path), best=self.best_model_path)

    def _note_best(self, trainer: Trainer, path: Path) -> None:
        self._monitored.warn_if_unknown(trainer)
        if self._is_best:
            self.best_model_score, self.best_model_path = self._monitored.value, str(path)

    @property
    def _is_best(self) -> bool:
        value, best = self._monitored.value, self.best_model_score
        if value is None or best is None:
            return value is not None
        return value > best if self.mode == "max" else value < best

    def _set_aside_later(self) -> None:
        """Rename checkpoints of iterations after the resumed one: the run will not go through their states."""
        later = [path for path in self.checkpoints if iteration_of(path) > self.iteration]
        for path in later:
            aside = path.with_name(path.name + SET_ASIDE)
            remove(aside)  # left by an earlier resume; a rename does not replace a folder
            path.rename(aside)
        if later:
            rank_zero_warn(
                f"the run continues from iteration {self.iteration}; {len(later)} checkpoint(s) of later iterations in "
                f"{self.dirpath} now have the suffix {SET_ASIDE}. Delete them if they are not needed."
            )

    def _remove_old(self) -> None:
        if self.keep is not None:
            for path in self.checkpoints[: -self.keep]:
                if str(path) != self.best_model_path:
                    remove(path)


def _is_last_iteration(trainer: Trainer) -> bool:
    """Whether training ends after this batch, as far as can be known before its other hooks have run."""
    stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop or trainer.received_sigterm, all=False)
    last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
    return stop or (trainer.is_last_batch and last_epoch) or 0 <= trainer.max_steps <= trainer.global_step


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
