"""A record of every sample: prompt, response, score, KL, advantage."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.distributed.processes import gather_objects, place
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience, Finish, PromptBatch
from lightning_rlhf.metrics.experience import row_kl
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.loggers import tell
from lightning_rlhf.reporting.prompt_records import (
    DamagedPieces,
    compact,
    next_start,
    piece_path,
    read_records,
    write_piece,
)
from lightning_rlhf.rewards.base import origin
from lightning_rlhf.rewards.safety import SafetyFilter, marks


class PromptRecords(RLHFCallback):
    """Writes a row per sample to Parquet pieces in ``prompts/`` of the run's folder.

    ``lightning-rlhf prompts RUN`` reads them; :data:`lightning_rlhf.reporting.prompt_records.COLUMNS` are the columns.
    Each rank writes its own samples, every iteration; every ``every_n_iterations`` the pieces are joined into one, and
    the worst samples since the last time go to loggers as a table ``worst_samples``. Iterations that are done again
    after a resume count once. A piece that cannot be read (a full or failing disk) is warned about and left as it is.

    Args:
        every_n_iterations: iterations of one piece, and between two tables.
        rows: samples of the table, those with the lowest scores; 0 for no table.
    """

    def __init__(self, every_n_iterations: int = 20, rows: int = 16) -> None:
        bounded("prompt_records", at_least=1, whole=True, every_n_iterations=every_n_iterations)
        bounded("prompt_records", at_least=0, whole=True, rows=rows)
        self.every_n_iterations, self.rows = every_n_iterations, rows
        self._start = 0
        self._origins: dict[str, str] = {}
        self._damaged = DamagedPieces(warnings.warn)  # of this rank: each reads its own

    def on_train_start(self, trainer: Trainer, module: ActorCriticModule) -> None:  # type: ignore[override]
        """Take the next number of a start; all ranks take that of rank 0, which may have written already."""
        self._start = gather_objects(next_start(Path(trainer.default_root_dir)))[0]

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        self._origins = {key: origin(row) for key, row in zip(prompts.keys, prompts.rows, strict=True)}

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        folder, (rank, _) = Path(trainer.default_root_dir), place()
        path = piece_path(folder, self._start, stats.iteration, stats.iteration, rank)
        write_piece(path, columns(experience, stats.iteration, self._origins, module.safety))
        if stats.iteration % self.every_n_iterations == 0:
            compact(folder, self._start, rank, stats.iteration, self._damaged)
            if self.rows:
                self._show_worst(trainer, stats.iteration)

    def _show_worst(self, trainer: Trainer, iteration: int) -> None:
        """Give loggers the lowest scores of all ranks since the last table; each rank reads its own files."""
        since, (rank, _) = iteration - self.every_n_iterations + 1, place()
        own = read_records(Path(trainer.default_root_dir), since=since, rank=rank, damaged=self._damaged)
        everyone = gather_objects(worst(own, self.rows))
        if trainer.is_global_zero:
            found = worst((row for of_rank in everyone for row in of_rank), self.rows)
            shown = [{name: row[name] for name in row if name != "terms"} | row["terms"] for row in found]
            tell(trainer.loggers, "log_table", shown, iteration, "worst_samples")


def worst(records: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The records with the lowest scores, lowest first; of equal ones the earliest."""
    return heapq.nsmallest(count, records, key=lambda row: row["score"])


def columns(
    experience: Experience, iteration: int, origins: dict[str, str], safety: SafetyFilter | None = None
) -> dict[str, list[Any]]:
    """The experience of this rank as columns; a number that was not measured is null.

    Args:
        experience: with advantages.
        iteration: counted from 1.
        origins: place of origin of each prompt key.
        safety: the filter that the rows went through.
    """
    count, kl = len(experience), row_kl(experience)
    valid = experience.require("loss_mask")
    advantage = experience.require("advantages").masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1)
    scores = experience.require("scores").tolist()
    names, terms = list(experience.components), [term.tolist() for term in experience.components.values()]
    return {
        "iteration": [iteration] * count,
        "key": experience.prompt_key,
        "origin": [origins.get(key) for key in experience.prompt_key],
        "prompt_group": experience.prompt_group or [None] * count,
        "prompt": experience.prompts,
        "response": experience.texts,
        "finish": [Finish(code).name.lower() for code in experience.finish.tolist()],
        "safety": marks(experience, safety),
        "tokens": experience.response_lengths.tolist(),
        "score": scores,
        "terms": [list(zip(names, values, strict=True)) for values in zip(*terms, strict=True)],
        "kl_ref": [None] * count if kl is None else _numbers(kl.tolist()),
        "advantage": _numbers(advantage.tolist()),
        "staleness": (iteration - 1 - experience.policy_version).tolist(),
        "seed": experience.seed.tolist(),
    }


def _numbers(values: list[float]) -> list[float | None]:
    """NaN as null: a row whose tokens were all rejected has no advantage."""
    return [value if value == value else None for value in values]
