"""Progress of a run: one line redrawn in a terminal, a plain line every few iterations elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.bounds import bounded
from lightning_rlhf.data.fingerprint import held_out
from lightning_rlhf.reporting.stages import StageWatch
from lightning_rlhf.reporting.terminal import note, say
from lightning_rlhf.reporting.untrained import Untrained

CONSTANT = 3
"""Iterations in a row without any difference between scores, or any step, after which the user is told."""
RECENT = 20
"""Number of recent iterations from whose mean time the remaining time is computed."""


class ProgressLines(ProgressBar):
    """Iteration, mean reward, KL, tokens per second and time left, from rank 0 only.

    Every ``every``-th iteration, the first and the last are plain lines in ``train.log``, and in the output if
    it is not a terminal (a file, a job's log). In a terminal one line is redrawn after each iteration, cut to the
    terminal's width. A stage of an iteration that goes on for long is a plain line, too.

    Args:
        iterations: length of the run.
        every: iterations between two plain lines; ``None``: no plain line.
        terminal: draw a line in the terminal, if the output is one.
    """

    def __init__(self, iterations: int, every: int | None = 5, *, terminal: bool = True) -> None:
        super().__init__()
        bounded("", at_least=1, whole=True, optional=True, progress_every=every)
        self.iterations, self.every = iterations, every
        self.drawn = terminal and sys.stdout.isatty()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._since = 0.0
        self._line = ""
        self._enabled = True
        self._announced = False
        self._start: dict[str, Any] = {}
        self._constant = 0
        self._untrained = Untrained(min(CONSTANT, iterations))
        self._watch = StageWatch(self._going_on)

    def disable(self) -> None:
        """Lightning calls this on all ranks but 0."""
        self._enabled = False

    def enable(self) -> None:
        """The opposite of :meth:`disable`."""
        self._enabled = True

    # --- stages: RL events -------------------------------------------------------------------------------------------

    def on_rollout_start(self, *_: Any) -> None:
        self._watch.begin("rollout")

    def on_rollout_end(self, *_: Any) -> None:
        self._watch.begin("rewards and scoring")

    def on_experience_ready(self, *_: Any) -> None:
        self._watch.begin("update")

    def on_update_end(self, *_: Any) -> None:
        self._watch.begin("new weights for the engine")

    def _going_on(self, text: str) -> None:
        """Into ``train.log``, and into the output where progress is told in plain lines."""
        if self.drawn or self.every is None:
            note(text)
        else:
            say(text)

    # --- Lightning's hooks -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch the stages, on rank 0."""
        super().setup(trainer, pl_module, stage)
        if self._enabled:
            self._watch.begin("")
            self._watch.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch no longer."""
        self._watch.stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce the evaluation: it may take long, and a silent log looks like a hung run.

        As a plain line once before or during the training, and once after it.
        """
        if not (self._enabled and trainer.is_global_zero):
            return
        self._watch.begin("evaluation")
        during = trainer.state.fn == TrainerFn.FITTING
        if self.drawn:
            self._draw("evaluating the held-out prompts")
        elif self.every is not None and not (during and self._announced):
            say("evaluating the held-out prompts")
        self._announced = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Erase the line about the evaluation; keep the numbers of the one before the first iteration."""
        self._watch.begin("")
        if self.drawn and self._line:
            self._erase()
        iteration, numbers = getattr(pl_module, "last_evaluation", None) or (None, {})
        if iteration == 0:
            self._start = {"numbers": dict(numbers), "held_out": _held_out_now(trainer)}

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the evaluation before the first iteration, for the closing lines of a later start."""
        return self._start

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` returned."""
        self._start = state_dict

    def at_the_start(self, trainer: Trainer) -> dict[str, float]:
        """The held-out metrics before the run's first iteration; empty if unknown, or of other held-out prompts."""
        return self._start["numbers"] if self._start.get("held_out") == _held_out_now(trainer) else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the first iteration."""
        self._since = time.perf_counter()
        self._untrained.begin(pl_module)
        self._clear_before_log_records()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the line of the iteration that has ended."""
        self._watch.begin("")
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        self._since = now
        if not (self._enabled and trainer.is_global_zero):
            return
        numbers = trainer.callback_metrics
        iteration = int(numbers.get("clock/iteration", batch_idx + 1))
        text = self.text(iteration, {name: float(value) for name, value in numbers.items()})
        due = self.every is not None and (iteration in (1, self.iterations) or iteration % self.every == 0)
        if self.drawn:
            self._draw(text)
            if due:
                note(text)
        elif due:
            say(text)
        self._look_at(iteration, numbers, pl_module)

    def _look_at(self, iteration: int, numbers: Mapping[str, Any], module: Any) -> None:
        """Say once what looks like a slow start: a run without steps, or a reward that never varies.

        The latter is a wrong reward, or answers that are cut off.
        """
        text = self._untrained.note(iteration, numbers, module)
        if not self._untrained.row and "reward/std" in numbers and "reward/mean" in numbers:
            self._constant = self._constant + 1 if float(numbers["reward/std"]) == 0 else 0
            if self._constant == CONSTANT:
                text = (
                    f"note: iterations {iteration - CONSTANT + 1} to {iteration}: every score was "
                    f"{float(numbers['reward/mean']):g}, so nothing can be learned from the reward; look at the "
                    "responses (samples in the tracker), at the reward and at rollout.max_new_tokens"
                )
        if text is not None:
            with self._undrawn():
                say(text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last drawn line in place."""
        self._leave_line()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Move to a new line, so that the error message begins there."""
        self._watch.stop()
        self._leave_line()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``trainer.print`` of a callback, above the drawn line."""
        with self._undrawn():
            print(*args, **kwargs)

    # --- the text ----------------------------------------------------------------------------------------------------

    def text(self, iteration: int, numbers: dict[str, float]) -> str:
        """The line of one iteration; missing numbers are left out."""
        kl = next((name for name in ("kl/ref", "kl/old") if name in numbers), None)
        parts = [f"iteration {iteration}/{self.iterations}"]
        if "reward/mean" in numbers:
            parts.append(f"reward {numbers['reward/mean']:.3f}")
        if kl is not None:
            parts.append(f"{kl} {numbers[kl]:.4f}")
        if "perf/tokens_per_second" in numbers:
            parts.append(f"{numbers['perf/tokens_per_second']:.0f} tok/s")
        if self._seconds:
            left = (self.iterations - iteration) * sum(self._seconds) / len(self._seconds)
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    # --- the drawn line ----------------------------------------------------------------------------------------------

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._line = text[:width]
        sys.stdout.write(f"\r\x1b[K{self._line}")
        sys.stdout.flush()

    def _leave_line(self) -> None:
        if self._line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._line = ""

    @contextmanager
    def _undrawn(self) -> Iterator[None]:
        """Text printed inside this context appears above the drawn line."""
        line = self._line
        if line:
            self._erase()
        yield
        if line:
            self._draw(line)

    def _clear_before_log_records(self) -> None:
        """Erase the drawn line before a handler of the root logger writes a log record into the terminal."""
        if not self.drawn:
            return
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.addFilter(self._make_room)

    def _make_room(self, record: logging.LogRecord) -> bool:
        if self._line:
            self._erase()
        return True

    def _erase(self) -> None:
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()
        self._line = ""


def _held_out_now(trainer: Trainer) -> dict[str, Any]:
    """The fingerprint of the held-out prompts; a data module of one's own may not say which they are."""
    return held_out(getattr(getattr(trainer, "datamodule", None), "validation_prompts", ()))


def duration(seconds: float) -> str:
    """``0:42``, ``3:05:00``: minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
