"""A table of samples: prompts, responses and scores; and one of the unsafe draws that a safety filter has found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.distributed.processes import gather_objects
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience, Finish, Safety
from lightning_rlhf.files import write_whole
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.loggers import tell

_Item = TypeVar("_Item")


class SamplesTable(RLHFCallback):
    """Writes ``samples/iteration_000010.jsonl`` below the run's folder, and a table to loggers that take one.

    A logger takes samples if it has a method ``log_samples(rows, iteration)``, as the kit's MLflow logger does.

    With a safety filter the unsafe draws since the last table, which may appear nowhere else, are written to
    ``samples/unsafe_000010.jsonl`` and, by ``log_table``, to the table ``unsafe_samples``. **They are offensive text.**

    Args:
        every_n_iterations: iterations between two tables.
        rows: number of samples, spread evenly from the worst score to the best.
        unsafe_rows: unsafe draws of each iteration at most, of all ranks, spread evenly over them; 0 for none.
    """

    def __init__(self, every_n_iterations: int = 10, rows: int = 8, unsafe_rows: int = 8) -> None:
        bounded("samples_table", at_least=1, whole=True, every_n_iterations=every_n_iterations, rows=rows)
        bounded("samples_table", at_least=0, whole=True, unsafe_rows=unsafe_rows)
        self.every_n_iterations, self.rows, self.unsafe_rows = every_n_iterations, rows, unsafe_rows
        self._unsafe: list[dict[str, Any]] = []
        """Since the last table; the same on every rank."""

    def on_train_start(self, trainer: Trainer, module: ActorCriticModule) -> None:  # type: ignore[override]
        """Remove tables of an earlier start whose rows come again: they are kept, or drawn anew."""
        again = min((row["iteration"] for row in self._unsafe), default=module.control.iteration + 1)
        for path in _path(trainer, "unsafe", 0).parent.glob("unsafe_??????.jsonl") if trainer.is_global_zero else ():
            if path.stem[-6:].isdigit() and int(path.stem[-6:]) >= again:
                path.unlink()

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        due = stats.iteration == 1 or stats.iteration % self.every_n_iterations == 0
        if self.unsafe_rows and experience.safety is not None:
            self._unsafe += unsafe_samples(experience, self.unsafe_rows, stats.iteration)
            if due:
                self._write_unsafe(trainer, stats.iteration)
                self._unsafe = []
        if not (due and trainer.is_global_zero):
            return
        rows = samples(experience, self.rows)
        _write(trainer, "iteration", stats.iteration, rows)
        tell(trainer.loggers, "log_samples", rows, stats.iteration)

    def on_train_end(self, trainer: Trainer, module: ActorCriticModule) -> None:  # type: ignore[override]
        """Write the unsafe draws since the last table; a run that is resumed has them in its next one instead."""
        self._write_unsafe(trainer, module.control.iteration)

    def _write_unsafe(self, trainer: Trainer, iteration: int) -> None:
        if self._unsafe and trainer.is_global_zero:
            _write(trainer, "unsafe", iteration, self._unsafe)
            tell(trainer.loggers, "log_table", self._unsafe, iteration, "unsafe_samples")

    def state_dict(self) -> dict[str, Any]:
        return {"unsafe": list(self._unsafe)} if self._unsafe else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unsafe = list(state_dict.get("unsafe", []))


def _path(trainer: Trainer, name: str, iteration: int) -> Path:
    return Path(trainer.default_root_dir) / "samples" / f"{name}_{iteration:06d}.jsonl"


def _write(trainer: Trainer, name: str, iteration: int, rows: list[dict[str, Any]]) -> None:
    write_whole(_path(trainer, name, iteration), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def spread(items: Sequence[_Item], most: int) -> list[_Item]:
    """At most so many of the items, evenly spread from the first to the last."""
    count = min(most, len(items))
    return [items[round(k * (len(items) - 1) / max(count - 1, 1))] for k in range(count)]


def unsafe_samples(experience: Experience, rows: int, iteration: int) -> list[dict[str, Any]]:
    """Unsafe draws of all ranks, at most ``rows``, the same on every rank, all of which must call this."""
    # Without draws where an earlier release drew the rollout ahead.
    told = zip(experience.prompt_key, experience.prompts, experience.unsafe_draws, strict=bool(experience.unsafe_draws))
    own = [
        {"iteration": iteration, "prompt_key": key, "prompt": prompt, **draw}
        for key, prompt, draws in told
        for draw in draws
    ]
    return spread([row for rank in gather_objects(spread(own, rows)) for row in rank], rows)


def samples(experience: Experience, rows: int) -> list[dict[str, Any]]:
    """Rows of the table, ordered by score and spread evenly over its range."""
    scores = experience.require("scores")
    chosen = spread(scores.argsort(stable=True).tolist(), rows)
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
