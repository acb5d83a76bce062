"""The jobs of ``--multirun``: a failing job does not end the others, and the last lines give each job's result."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
    def one(self) -> Iterator[dict[str, float]]:
        """Context of one job. In a sweep its error is recorded, and the next job begins.

        Yields:
            Where the job's last metrics go, for its line.
        """
        metrics: dict[str, float] = {}
        hydra = HydraConfig.get()
        if hydra.mode is not RunMode.MULTIRUN:
            yield metrics
            return
        swept = {o.key_or_group for o in parse(Composition.of_command(self.typed).overrides) if o.is_sweep_override()}
        own = [word for word in hydra.overrides.task if word.partition("=")[0].lstrip("+") in swept]
        name = f"job {hydra.job.num} ({' '.join(own or hydra.overrides.task)})"
        try:
            yield metrics
        except Exception as error:
            self.failed += 1
            said = isinstance(error, (InputError, RunEnded))  # the message needs no class name before it
            reason = str(error).removeprefix("FAILED: ") if said else f"{type(error).__name__}: {error}"
            print(f"{name} has failed: {reason}", file=sys.stderr, flush=True)
            if not said:
                traceback.print_exc()
            _keep(reason, Path(hydra.runtime.output_dir))
            self.lines.append(f"{name}: failed: {reason}".replace("\n", "\n    "))
        else:
            shown = next((key for key in ("eval/reward_mean", "reward/mean") if key in metrics), None)
            result = "" if shown is None else f"{shown} {metrics[shown]:.4g}, "
            self.lines.append(f"{name}: done, {result}in {hydra.runtime.output_dir}")

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


def _keep(reason: str, folder: Path) -> None:
    """Write the reason into ``train.log`` of a job that was refused before its run could do so."""
    log = folder / "train.log"
    if folder.is_dir() and not (log.exists() and reason.splitlines()[0] in log.read_text(encoding="utf-8")):
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{reason}\n")
