"""A table of samples: prompts, responses and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience, Finish, Safety
from lightning_rlhf.files import write_whole
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.loggers import tell


class SamplesTable(RLHFCallback):
    """Writes ``samples/iteration_000010.jsonl`` below the run's folder, and a table to loggers that take one.

    A logger takes samples if it has a method ``log_samples(rows, iteration)``, as the kit's MLflow logger does.

    Args:
        every_n_iterations: iterations between two tables.
        rows: number of samples, spread evenly from the worst score to the best.
    """

    def __init__(self, every_n_iterations: int = 10, rows: int = 8) -> None:
        bounded("samples_table", at_least=1, whole=True, every_n_iterations=every_n_iterations, rows=rows)
        self.every_n_iterations, self.rows = every_n_iterations, rows

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        due = stats.iteration == 1 or stats.iteration % self.every_n_iterations == 0
        if not (due and trainer.is_global_zero):
            return
        rows = samples(experience, self.rows)
        path = Path(trainer.default_root_dir) / "samples" / f"iteration_{stats.iteration:06d}.jsonl"
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        tell(trainer.loggers, "log_samples", rows, stats.iteration)


def samples(experience: Experience, rows: int) -> list[dict[str, Any]]:
    """Rows of the table, ordered by score and spread evenly over its range."""
    scores = experience.require("scores")
    order = scores.argsort(stable=True).tolist()
    count = min(rows, len(order))
    chosen = [order[round(k * (len(order) - 1) / max(count - 1, 1))] for k in range(count)]
    lengths = experience.response_lengths.tolist()
    safety = None if experience.safety is None else experience.safety.tolist()
    kl = None
    if experience.ref_logprobs is not None:
        kl = (experience.require("old_logprobs") - experience.ref_logprobs).sum(-1).tolist()
    return [
        {
            "prompt": experience.prompts[i],
            "response": experience.texts[i],
            "score": float(scores[i]),
            **{name: float(term[i]) for name, term in experience.components.items()},
            "kl_ref": kl[i] if kl is not None else None,
            "tokens": lengths[i],
            "finish": Finish(int(experience.finish[i])).name.lower(),
            **({} if safety is None else {"safety": Safety(safety[i]).name.lower()}),
            "prompt_key": experience.prompt_key[i],
            **({"prompt_group": experience.prompt_group[i]} if experience.prompt_group else {}),
            "seed": int(experience.seed[i]),
        }
        for i in chosen
    ]
