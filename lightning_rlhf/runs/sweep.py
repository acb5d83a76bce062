"""The jobs of ``--multirun``: a failing job does not end the others, and the last lines give each job's result."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lightning_rlhf.errors import RunEnded
from lightning_rlhf.runs.recompose import Composition, parse
from lightning_rlhf.schema import InputError


class JobsFailed(InputError):
    """Some jobs of a sweep have failed; the message gives each job's result."""


@dataclass
class Jobs:
    """Results of the jobs of a sweep; unused outside of a sweep.

    Attributes:
        typed: the arguments of the command.
        lines: one for each job that has ended.
        failed: number of failed jobs.
    """

    typed: Sequence[str] = ()
    lines: list[str] = field(default_factory=list)
    failed: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Context of one job. In a sweep its error is recorded, and the next job begins."""
        hydra = HydraConfig.get()
        if hydra.mode is not RunMode.MULTIRUN:
            yield
            return
        swept = {o.key_or_group for o in parse(Composition.of_command(self.typed).overrides) if o.is_sweep_override()}
        own = [word for word in hydra.overrides.task if word.partition("=")[0].lstrip("+") in swept]
        name = f"job {hydra.job.num} ({' '.join(own or hydra.overrides.task)})"
        try:
            yield
        except Exception as error:
            self.failed += 1
            print(f"{name} has failed:", file=sys.stderr)
            said = isinstance(error, (InputError, RunEnded))  # the message needs no class name before it
            if not said:
                traceback.print_exc()
            kind = "" if said else f"{type(error).__name__}: "
            self.lines.append(f"{name}: failed: {kind}{error}".replace("\n", "\n    "))
        else:
            self.lines.append(f"{name}: done, in {hydra.runtime.output_dir}")

    def report(self) -> None:
        """Print the results of the jobs.

        Raises:
            JobsFailed: some have failed.
        """
        if not self.lines:
            return
        text = "\n".join([f"{len(self.lines)} jobs, {self.failed} of them failed", *self.lines])
        if self.failed:
            raise JobsFailed(text)
        print(text, flush=True)
