"""One save: written here or in the background, verified, old ones removed, a copy sent off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.checkpoint.capture import Captured
from lightning_rlhf.checkpoint.copies import Copies
from lightning_rlhf.checkpoint.files import CheckpointError, not_written, remove
from lightning_rlhf.checkpoint.probe import Asked
from lightning_rlhf.checkpoint.records import problem_of
from lightning_rlhf.checkpoint.retention import checkpoints_in, superseded
from lightning_rlhf.checkpoint.writer import Writer, free_host_memory
from lightning_rlhf.distributed.processes import gather_objects

_ROOM = 1.25
"""Free host memory wanted for a copy of the state, in sizes of that copy."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is in place.

    Attributes:
        path: of the file or folder.
        problem: why it failed its verification; ``None``: it is good.
    """

    path: Path
    problem: str | None


class Saving:
    """Saves a run's checkpoints, one after another. Rank 0 does what one process does alone.

    Args:
        folder: where they are.
        keep: how many of the newest are kept; ``None``: all.
        asynchronous: let training go on while a file is written.
        copies: where each good one is copied to.
    """

    def __init__(self, folder: Path, keep: int | None, asynchronous: bool, copies: Copies | None = None) -> None:
        self.folder, self.keep, self.asynchronous, self.copies = folder, keep, asynchronous, copies
        self._writer: Writer[Written] = Writer()
        self._path = folder
        self._said_synchronous = False

    @property
    def busy(self) -> bool:
        """Whether a save was begun whose end was not noted yet."""
        return self._writer.busy

    @property
    def ready(self) -> bool:
        """Whether a save has ended whose end was not noted yet."""
        return self._writer.done

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._writer.failed

    def begin(
        self, trainer: Trainer, captured: Captured, path: Path, *, best: str, asked: Asked | None, held: bool
    ) -> bool:
        """Begin to save; :meth:`take` or :meth:`end` waits for it. Called on every rank.

        Args:
            trainer: between two iterations.
            captured: the state.
            path: where it goes.
            best: path of the best checkpoint, this one or an earlier one.
            asked: the live model's answers to compare with those of the file.
            held: whether weights stay as they are until :meth:`wait_for_copy`; if not, they are copied before this
                returns.

        Returns:
            Whether it goes on in the background, the same on every rank; if not, it has ended.
        """
        if not self._in_background(trainer, captured):
            self.now(trainer, captured, path, best=best, asked=asked)
            return False
        self._path = path
        after = partial(self._after, path, best, asked)
        if not trainer.is_global_zero:
            self._writer.now(lambda: Written(path, None))
            return True
        save = trainer.strategy.checkpoint_io.save_checkpoint
        copy = partial(_copied, captured, path)
        self._writer.in_background(copy, lambda content: _both(partial(save, content, path), after, True, path))
        if not held:
            self.wait_for_copy()
        return True

    def now(self, trainer: Trainer, captured: Captured, path: Path, *, best: str, asked: Asked | None = None) -> None:
        """Save here, whatever the settings say."""
        self._path = path
        after = partial(self._after, path, best, asked)
        self._writer.now(lambda: _both(partial(captured.write, trainer, path), after, trainer.is_global_zero, path))

    def wait_for_copy(self) -> None:
        """Wait until weights and optimiser state may change again."""
        self._writer.wait_for_copy()

    def take(self) -> Written | None:
        """Wait for the save of this rank; ``None`` if there is none.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._writer.take() if self._writer.busy else None

    def end(self) -> Written | None:
        """Wait for the save on all ranks, which all call this; ``None`` if there is none.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        if not self._writer.busy:
            return None
        written, failure = None, None
        try:
            written = self._writer.take()
        except CheckpointError as error:
            failure = error
        # Several processes wait for one another: each must get here, whether or not its own write succeeded.
        ends = gather_objects((str(failure) if failure else None, written.problem if written else None))
        message = next((text for text, _ in ends if text is not None), None)
        if message is not None:
            raise failure or CheckpointError(message)
        return Written(self._path, next((problem for _, problem in ends if problem is not None), None))

    def finish_copies(self, trainer: Trainer, best: str) -> None:
        """Wait for the copies, then remove what was kept for them only."""
        if self.copies is not None and trainer.is_global_zero:
            self.copies.finish()
            self._remove_old(best)

    def _remove_old(self, best: str) -> None:
        spared = {best} | (self.copies.in_use if self.copies is not None else set())
        for old in superseded(checkpoints_in(self.folder), self.keep, spared):
            remove(old)

    def _after(self, path: Path, best: str, asked: Asked | None) -> Written:
        """Rank 0: what follows a file that is in place."""
        if asked is not None and problem_of(path) is None:
            asked.compare(path)
        problem = problem_of(path)
        self._remove_old(best)
        if self.copies is not None and problem is None:
            self.copies.send(path)
        return Written(path, problem)

    def _in_background(self, trainer: Trainer, captured: Captured) -> bool:
        """Whether this save can be written by one process alone, and its memory holds a copy of the state."""
        if not self.asynchronous or type(trainer.strategy).save_checkpoint is not Strategy.save_checkpoint:
            return False
        free = free_host_memory() if trainer.is_global_zero else None
        roomy = free is None or _ROOM * captured.size < free
        if gather_objects(roomy)[0]:
            return True
        if not self._said_synchronous:
            rank_zero_warn(
                f"checkpoints are written while training waits: a copy of the state needs {captured.size / 2**30:.2f} "
                f"GiB, and {(free or 0) / 2**30:.2f} GiB of host memory are free "
                "(callbacks.checkpoint.asynchronous=false does this without a warning)"
            )
            self._said_synchronous = True
        return False


def _both(write: Callable[[], Any], after: Callable[[], Written], first: bool, path: Path) -> Written:
    """Write on this rank; rank 0 then does the rest.

    Raises:
        CheckpointError: it could not be written, or what follows it failed.
    """
    write()
    if not first:
        return Written(path, None)
    try:
        return after()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path} was written, but what follows failed: {error}") from error


def _copied(captured: Captured, path: Path) -> dict[str, Any]:
    """The state in host memory.

    Raises:
        CheckpointError: it changes meanwhile, or memory ran out.
    """
    try:
        return captured.on_host()
    except CheckpointError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise not_written(path, error) from error
