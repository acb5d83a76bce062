"""The jobs of ``--multirun``: one that fails does not end the others, and the end says how each has fared."""

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
    """Some jobs of a sweep have failed; the message says how each has fared."""


@dataclass
class Jobs:
    """How the jobs of a sweep have fared; nothing outside of a sweep.

    Attributes:
        typed: the words of the command.
        lines: one for each job that has ended.
        failed: how many of them have failed.
    """

    typed: Sequence[str] = ()
    lines: list[str] = field(default_factory=list)
    failed: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A job. Within a sweep its error is kept, and the next job begins."""
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
            said = isinstance(error, (InputError, RunEnded))  # the message is all there is to say
            if not said:
                traceback.print_exc()
            kind = "" if said else f"{type(error).__name__}: "
            self.lines.append(f"{name}: failed: {kind}{error}".replace("\n", "\n    "))
        else:
            self.lines.append(f"{name}: done, in {hydra.runtime.output_dir}")

    def report(self) -> None:
        """Say how the jobs have fared.

        Raises:
            JobsFailed: some have failed.
        """
        if not self.lines:
            return
        text = "\n".join([f"{len(self.lines)} jobs, {self.failed} of them failed", *self.lines])
        if self.failed:
            raise JobsFailed(text)
        print(text, flush=True)
