"""Collects an iteration's metrics, counters, times, knobs and decisions for the loggers."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_rlhf.accelerators.device import peak_bytes, reset_peak
from lightning_rlhf.events import UpdateStats
from lightning_rlhf.metrics.names import check

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

STABILITY_COUNTS = {
    "stop_epochs": "epochs_stopped",
    "skip_step": "steps_skipped",
    "rollbacks": "rollbacks",
    "nonfinite_steps": "nonfinite_steps",
    "empty_minibatches": "empty_minibatches",
    "oom_retry": "oom_retries",
    "lower_learning_rate": "learning_rate_cuts",
    "raise_kl_coefficient": "kl_brakes",
    "shorten_responses": "length_cuts",
}
"""Cumulative counts of ``module.control`` and the metric each is logged as."""

SAID = 3
"""How many decisions of one kind are printed per start of a run."""
ALWAYS_SAID = ("rollback", "stop_training")
ONE_KIND = ("suspect_prompts",)
"""Verbs whose reasons are all of one kind, although they name something else each time."""
NUMBERS = re.compile(r"\b(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b")
"""Numbers in a reason: reasons of one kind differ in nothing else."""


class Logbook:
    """Measures times, counts sequences and tokens, and logs each iteration once."""

    def __init__(self, module: ActorCriticModule) -> None:
        self.module = module
        self.progress = {"sequences": 0, "tokens": 0}
        """Totals of the whole run; saved in checkpoints."""
        self._times: dict[str, float] = {}
        self._start = 0.0
        self._written = 0
        """Decisions of this iteration that are written."""
        self._shown: set[str] = set()
        self._said: Counter[tuple[str, str]] = Counter()

    def begin_iteration(self) -> None:
        """Start the clock of an iteration."""
        self._times, self._written = {}, 0
        self._start = time.perf_counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Log the seconds spent inside as ``time/<name>``; an error raised inside gets the attribute ``phase``."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not hasattr(error, "phase"):
                error.phase = f"{name} of iteration {self.module.control.iteration}"  # type: ignore[attr-defined]
            raise
        self._times[name] = time.perf_counter() - start

    def write(self, numbers: dict[str, float], update: UpdateStats) -> None:
        """Complete this iteration's metrics and hand them to loggers and the progress bar."""
        module, control = self.module, self.module.control
        self._times["iteration"] = time.perf_counter() - self._start
        sequences, tokens = numbers.pop("batch/sequences"), numbers.pop("batch/tokens")
        self.progress["sequences"] += int(sequences)
        self.progress["tokens"] += int(tokens)
        numbers |= {"ppo/epochs_used": update.epochs_used, "ppo/updates": update.steps}
        numbers |= {"ppo/steps_skipped": update.steps_skipped, "kl/coefficient": control.applied["kl_coefficient"]}
        numbers |= {f"lr/{g['name']}": g["lr"] for g in module.optimizers().param_groups}  # type: ignore[union-attr]
        numbers |= self._control()
        numbers |= {f"clock/{name}": count for name, count in self.progress.items()}
        numbers |= {f"time/{name}": seconds for name, seconds in self._times.items()}
        dropped = getattr(getattr(module.trainer, "datamodule", None), "dropped", None)
        if dropped is not None:
            numbers["data/prompts_dropped"] = sum(dropped.values())
        numbers |= getattr(getattr(module.trainer, "datamodule", None), "list_numbers", {})
        numbers["perf/tokens_per_second"] = tokens / self._times["iteration"]
        peak = peak_bytes(module.device)
        if peak is not None:
            numbers["memory/peak_gib"] = peak / 2**30
            reset_peak(module.device)
        numbers |= control.reported
        check(numbers)
        self.write_decisions()
        # Lightning hands logged values to loggers only after the checkpoint of this iteration, as float32.
        for logger in module.loggers:
            logger.log_metrics(numbers, step=control.iteration)
        # ``bar`` is for a user's own progress bar; the kit's reads the metrics themselves.
        shown = ("reward/mean", "kl/ref", "perf/tokens_per_second")
        bar: dict[str, float] = {name: numbers[name] for name in shown if name in numbers}
        rest = {name: value for name, value in numbers.items() if name not in bar}
        self._forget_others(set(numbers))
        module.log_dict(rest, logger=False, on_step=True, on_epoch=False, batch_size=1)
        module.log_dict(bar, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def _forget_others(self, names: set[str]) -> None:
        """Remove metrics that this iteration did not measure from ``trainer.callback_metrics``.

        Lightning keeps the last value of every metric there, and a monitor would take it for a current one.
        """
        trainer: Any = self.module.trainer
        for name in self._shown - names:
            trainer._results.pop(f"training_step.{name}", None)
            trainer.callback_metrics.pop(name, None)
        self._shown = names

    def _control(self) -> dict[str, float]:
        """Knobs, multipliers, counts and the two clocks."""
        control = self.module.control
        numbers = {f"knob/{name}": value for name, value in control.applied.items()}
        numbers |= {
            f"stability/{name}_multiplier": math.prod(knob.multipliers.values())
            for name, knob in control.knobs.items()
            if knob.multipliers
        }
        numbers |= {f"stability/{name}": control.counts[verb] for verb, name in STABILITY_COUNTS.items()}
        return numbers | {"clock/iteration": control.iteration, "clock/update": control.update}

    def write_decisions(self) -> None:
        """Print new decisions of this iteration with their reasons, and hand all to loggers with ``log_decisions``.

        Repeated decisions are routine: of each kind (the verb, and its reason apart from numbers and but for
        :data:`ONE_KIND`) the first :data:`SAID` are printed. :data:`ALWAYS_SAID` names the verbs that are always
        printed.
        """
        rows = [asdict(decision) for decision in self.module.control.decisions[self._written :]]
        self._written += len(rows)
        listed = [logger for logger in self.module.loggers if hasattr(logger, "log_decisions")]
        for row in rows:
            kind = (row["verb"], "" if row["verb"] in ONE_KIND else NUMBERS.sub("#", row["reason"]))
            self._said[kind] += 1
            if row["verb"] in ALWAYS_SAID or self._said[kind] < SAID:
                rank_zero_info("iteration %(iteration)d: %(verb)s: %(reason)s", row)
            elif self._said[kind] == SAID:
                rank_zero_info(
                    "iteration %(iteration)d: %(verb)s: %(reason)s\n%(more)s",
                    row | {"more": _more(row["verb"], listed)},
                )
        for logger in listed if rows else []:
            logger.log_decisions(rows)


def _more(verb: str, listed: Sequence[object]) -> str:
    """Where to find the decisions that are no longer printed; ``listed``: the loggers that have them."""
    places = [f"counted in stability/{STABILITY_COUNTS[verb]}"] if verb in STABILITY_COUNTS else []
    named = [getattr(logger, "decisions_place", "decisions.jsonl") for logger in listed]
    files = dict.fromkeys(place for place in named if isinstance(place, str))
    places += [f"listed in {' and in '.join(files)}"] if files else []
    return "  more of this kind are not printed" + (f", but {' and '.join(places)}" if places else "")
