"""Checkpoints that are complete or absent, hold plain data, are counted in iterations and resume bit for bit.

Usable in any LightningModule under manual optimisation, where Lightning's own ``ModelCheckpoint`` counts optimiser
steps and so, if PPO epochs end early, saves at irregular iterations or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf import __version__
from lightning_rlhf.bounds import bounded
from lightning_rlhf.checkpoint.atomic import AtomicCheckpointIO
from lightning_rlhf.checkpoint.capture import Captured, can_capture, iteration_now, weights_are_finite
from lightning_rlhf.checkpoint.copies import Copies
from lightning_rlhf.checkpoint.files import PARTIAL, SET_ASIDE, CheckpointError, iteration_of, plain, remove, set_aside
from lightning_rlhf.checkpoint.format import FORMAT, refuse_format
from lightning_rlhf.checkpoint.monitor import Monitored, evaluation_follows
from lightning_rlhf.checkpoint.probe import Probe
from lightning_rlhf.checkpoint.retention import checkpoints_in
from lightning_rlhf.checkpoint.saving import Saving, Written
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.errors import SettingError
from lightning_rlhf.functional.stats import largest_over_ranks
from lightning_rlhf.interruption import Interrupted, signals
from lightning_rlhf.reporting.loggers import tell


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

    A checkpoint is read back before it counts: checksums, shapes, finite tensors. One that fails stays, is never the
    newest good one, and training goes on.

    Args:
        dirpath: folder of the checkpoints, on a local (or mounted) file system.
        every_n_iterations: iterations between two checkpoints.
        keep: number of newest checkpoints that are kept, beside the best and the newest verified one; ``None``: all.
        monitor: metric whose best checkpoint is kept as well; ``None``: none. Only a value that was logged for the
            iteration itself counts.
        mode: whether the largest (``max``) or the smallest (``min``) value of ``monitor`` is best.
        asynchronous: a thread copies the state and writes it while training goes on with the next rollout; training
            waits for the copy before weights change, and for the file before the next save and at every end. Folders
            of shards, and states that do not fit into host memory a second time, are written while training waits.
        probe: so many prompts are answered greedily by the live policy and by one loaded from the file; other answers
            are a failed verification. Training waits for the live policy's answers. ``None``: none.
        copy_to: folder, or address for fsspec, to which verified checkpoints are copied in the background; ``mlflow``:
            artifacts of the run. ``None``: nowhere.

    Attributes:
        iteration: training batches done since the run began, resumed parts included.
        last_model_path, best_model_path: the newest good checkpoint in place; the one with the best monitored value.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_iterations: int = 10,
        keep: int | None = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        asynchronous: bool = False,
        probe: int | None = None,
        copy_to: str | None = None,
    ) -> None:
        bounded("callbacks.checkpoint", at_least=1, whole=True, every_n_iterations=every_n_iterations)
        bounded("callbacks.checkpoint", at_least=1, whole=True, optional=True, keep=keep)
        bounded("callbacks.checkpoint", at_least=1, whole=True, optional=True, probe=probe)
        if not isinstance(asynchronous, bool):
            raise SettingError("callbacks.checkpoint.asynchronous", asynchronous, "true or false")
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
        self._best: tuple[float | None, str] = None, ""
        """Score and path of the best checkpoint, the one being written included."""
        self._best_before: tuple[float | None, str] = self._best
        self._probe = None if probe is None else Probe(probe)
        self._copies = None if copy_to is None else Copies(copy_to)
        self._saving = Saving(self.dirpath, keep, asynchronous, self._copies)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints in the folder, oldest iteration first."""
        return checkpoints_in(self.dirpath)

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
        strategy.checkpoint_io.buffers = frozenset(name for name, _ in pl_module.named_buffers())
        if self._copies is not None:
            self._copies.bind(trainer.loggers)
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

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._monitored.begin(trainer)
        if self._probe is not None:
            self._probe.see(batch)

    def on_rollout_end(self, trainer: Trainer, *args: Any) -> None:
        self._obey_signal(trainer)

    def on_experience_ready(self, trainer: Trainer, *args: Any) -> None:
        """From here on weights may change: drop the captured state; a signal waits until the iteration is finished."""
        self._obey_signal(trainer)
        self._captured = None
        self._saving.wait_for_copy()
        signals().hold(f"finishing iteration {self.iteration + 1}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.iteration += 1
        if evaluation_follows(trainer):
            self._capture(trainer)  # a failing evaluation must not lose the iteration
        else:
            self._end_iteration(trainer, evaluated=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals().install()  # Lightning sets its own handler at every start
        if trainer.state.fn == TrainerFn.FITTING:
            self._settle(trainer)  # what is decided by the evaluation may name the best checkpoint so far

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_iteration(trainer, evaluated=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last iteration, which :meth:`on_train_batch_end` could not know to be the last."""
        if self._saved < self.iteration:
            self.save(trainer)
        self._note_end(trainer, self._saving.end())
        self._captured = None
        signals().release()
        self._saving.finish_copies(trainer, self._best[1])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of the last iteration, if the weights have not changed since and it is not saved yet."""
        captured, self._captured = self._captured, None
        self._end_alone(trainer, type(exception).__name__)
        if captured is None or self._saved >= self.iteration or isinstance(exception, TrainingFailed):
            return
        together = trainer.world_size == 1 or getattr(exception, "on_every_rank", False)
        if captured.needs_all_ranks and not together:
            return  # other ranks wait elsewhere, perhaps for ever, and could not take part
        self._saving.now(trainer, captured, self._path, best=self._best[1])
        self._end_alone(trainer, type(exception).__name__)

    def _end_alone(self, trainer: Trainer, cause: str) -> None:
        """Wait for the save of this rank, without the others, which may be anywhere."""
        try:
            self._note_end(trainer, self._saving.take())
        except CheckpointError as error:
            rank_zero_warn(f"after {cause}: {error}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for a save that nothing has waited for: an end that is no exception of the training itself."""
        if self._saving.busy:
            self._end_alone(trainer, "an early end")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Not in state_dict(): Lightning's key for that contains the arguments, and the count must survive other ones.
        checkpoint["iteration"] = self.iteration
        if self.monitor is not None:
            best = checkpoint.setdefault("best_checkpoints", {})
            best[f"{self.mode} {self.monitor}"] = {"score": self._best[0], "path": self._best[1]}
        checkpoint["written_by"] = {"lightning_rlhf": __version__, "format": FORMAT}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.refuse_uncounted(checkpoint)
        self.iteration = self._saved = checkpoint["iteration"]
        best = checkpoint.get("best_checkpoints", {}).get(f"{self.mode} {self.monitor}")
        if best is not None:
            here = self.dirpath / Path(best["path"]).name  # also after the folder was moved
            self._best = best["score"], str(here) if best["path"] and here.exists() else best["path"]
            self.best_model_score, self.best_model_path = self._best

    def refuse_uncounted(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse (:class:`CheckpointError`) a checkpoint of a later format, or without iteration; changes nothing."""
        refuse_format(checkpoint)
        if "iteration" not in checkpoint:
            raise CheckpointError("the checkpoint was saved without IterationCheckpoint: it does not say its iteration")

    def _begin(self, iteration: int) -> None:
        """Start a fit of a module that has done this many iterations; the callback may have served another module."""
        self.iteration = self._saved = iteration
        if iteration == 0:
            self.best_model_score, self.best_model_path, self.last_model_path = None, "", ""
            self._best = None, ""
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
        """The signal that any rank has received, 0 if there was none.

        Raises:
            CheckpointError: on every rank, if a save in the background has failed on one.
        """
        device = trainer.strategy.root_device
        received, failed = largest_over_ranks([float(signals().received), float(self._saving.failed)], device)
        if failed:
            self._settle(trainer)
        if self._saving.ready and trainer.world_size == 1:
            self._settle(trainer)
        return int(received)

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
        self._settle(trainer)
        path = self._path
        if not weights_are_finite(trainer):
            self._captured = None
            raise CheckpointError(
                f"the weights after iteration {self.iteration} are not finite: no checkpoint of them is written. "
                "Earlier ones are untouched."
            )
        self._note_best(trainer, path)
        asked = None if self._probe is None else self._probe.ask(trainer)
        captured = Captured(trainer)
        held = can_capture(trainer.lightning_module)
        self._captured, self._saved = captured if held else None, self.iteration
        if not self._saving.begin(trainer, captured, path, best=self._best[1], asked=asked, held=held):
            self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        """Wait for the save on all ranks.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        try:
            self._note_end(trainer, self._saving.end())
        except CheckpointError:
            self._captured = None
            raise

    def _note_end(self, trainer: Trainer, written: Written | None) -> None:
        """A checkpoint is in place: from now on it is announced, as good or as failed."""
        if written is None:
            return
        if written.problem is None:
            self.last_model_path = str(written.path)
        else:
            if self._best[1] == str(written.path):
                self._best = self._best_before
            rank_zero_warn(
                f"checkpoint {written.path} FAILED its verification: {written.problem}. It stays there, but no resume "
                f"takes it by itself; the newest good one is {self.last_model_path or 'none of this start'}."
            )
        self.best_model_score, self.best_model_path = self._best
        if trainer.is_global_zero:
            known, latest = [str(p) for p in self.checkpoints], self.last_model_path
            tell(trainer.loggers, "log_checkpoints", known, latest=latest, best=self.best_model_path)

    def _note_best(self, trainer: Trainer, path: Path) -> None:
        self._monitored.warn_if_unknown(trainer)
        self._best_before = self._best
        if self._is_best:
            self._best = self._monitored.value, str(path)

    @property
    def _is_best(self) -> bool:
        value, best = self._monitored.value, self._best[0]
        if value is None or best is None:
            return value is not None
        return value > best if self.mode == "max" else value < best

    def _set_aside_later(self) -> None:
        """Rename checkpoints of iterations after the resumed one: the run will not go through their states."""
        later = [path for path in self.checkpoints if iteration_of(path) > self.iteration]
        for path in later:
            set_aside(path)
        if later:
            rank_zero_warn(
                f"the run continues from iteration {self.iteration}; {len(later)} checkpoint(s) of later iterations in "
                f"{self.dirpath} now have the suffix {SET_ASIDE}. Delete them if they are not needed."
            )


def _is_last_iteration(trainer: Trainer) -> bool:
    """Whether training ends after this batch, as far as can be known before its other hooks have run."""
    stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop or trainer.received_sigterm, all=False)
    last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
    return stop or (trainer.is_last_batch and last_epoch) or 0 <= trainer.max_steps <= trainer.global_step
