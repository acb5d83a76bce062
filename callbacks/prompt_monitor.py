"""Find the prompts that do not behave like the others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.distributed.processes import gather_objects
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.files import as_file, write_whole
from lightning_rlhf.functional.outliers import median
from lightning_rlhf.metrics.experience import row_kl
from lightning_rlhf.metrics.prompt_statistics import MEASURES, PromptStatistics, Standing, Visit
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.prompt_records import FOLDER, SUSPECTS

NAMED = 3
"""Prompts that a decision's reason names."""
VALUES = {"reward": "reward", "spread": "spread", "kl": "kl_excess"}
"""What the value of each measure is called in the list: other files have a prompt's KL itself (``kl_ref``)."""


class PromptMonitor(RLHFCallback):
    """Flags prompts whose mean reward, spread of rewards or KL lies far from that of the other prompts.

    Each prompt is compared over its own last visits, relative to the iteration's median prompt; the distance is a
    robust z-score, see :mod:`lightning_rlhf.metrics.prompt_statistics` and
    :func:`lightning_rlhf.functional.outliers.robust_z`. A mean reward is flagged on either side, spread and KL above.
    Nothing is done to a flagged prompt: it is counted, named, and listed in ``prompts/suspects.json`` of the run's
    folder for ``lightning-rlhf prompts``. A prompt that no longer stands out is no longer flagged; if it does again, it
    is not named again.

    Only the policy's own samples count, see ``experience.own``.

    Args:
        window: visits of a prompt that count, the last ones; at least 3, as the one that lies farthest out is left out
            and a spread needs two; at most 10,000, as they are kept in memory.
        z: robust standard deviations beyond which a prompt is flagged.
        min_visits: visits before a prompt is judged.
        min_prompts: prompts that can be judged before any is; with few the scale of the others is unknown.
    """

    def __init__(self, window: int = 10, z: float = 3.0, min_visits: int = 3, min_prompts: int = 50) -> None:
        bounded("prompt_monitor", at_least=3, at_most=10_000, whole=True, window=window)
        bounded("prompt_monitor", at_least=1, whole=True, min_visits=min_visits)
        bounded("prompt_monitor", above=0, z=z)
        bounded("prompt_monitor", at_least=3, whole=True, min_prompts=min_prompts)
        self.window, self.z, self.min_visits, self.min_prompts = window, z, min_visits, min_prompts
        self.statistics = PromptStatistics(window)
        self.since: dict[str, int] = {}
        """Flagged prompts, and the iteration since which each is."""
        self._named: set[str] = set()
        """Prompts that a decision was taken about: those flagged now, and earlier."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a folder in place of the list, before anything is trained."""
        as_file(Path(trainer.default_root_dir) / FOLDER / SUSPECTS)

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        everyone = gather_objects(visits_of(experience))
        self.statistics.add(merged(visit for of_rank in everyone for visit in of_rank))
        standing = self.statistics.standing(self.min_visits)
        judged = int((self.statistics.visits[: len(self.statistics)] >= self.min_visits).sum())
        module.control.report("prompts/seen", len(self.statistics))
        module.control.report("prompts/judged", judged)
        if judged < self.min_prompts:
            return
        reasons = self._reasons(standing)
        for name in MEASURES:
            module.control.report(f"prompts/flagged_{name}", sum(name in found for found in reasons.values()))
        module.control.report("prompts/flagged", len(reasons))
        new = {*reasons} - self._named
        self._named |= new
        self.since = {key: self.since.get(key, stats.iteration) for key in reasons}
        suspects = [self._suspect(key, found, standing) for key, found in reasons.items()]
        suspects.sort(key=lambda suspect: -_farthest(suspect))
        if new:
            named = ", ".join(_in_words(s) for s in [s for s in suspects if s["key"] in new][:NAMED])
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            module.control.note("suspect_prompts", f"unlike the others of {judged} prompts: {named}{more}")
        if trainer.is_global_zero:
            self._write(Path(trainer.default_root_dir) / FOLDER / SUSPECTS, stats.iteration, judged, suspects, standing)

    def _reasons(self, standing: Standing) -> dict[str, list[str]]:
        """The measures by which each flagged prompt stands out, in the order of first visits."""
        over = {name: standing.z[name] > self.z for name in MEASURES}
        over["reward"] = standing.z["reward"].abs() > self.z
        rows = torch.stack(list(over.values())).any(0).nonzero().flatten().tolist()
        keys = list(self.statistics.index)
        return {keys[row]: [name for name in MEASURES if over[name][row]] for row in rows}

    def _suspect(self, key: str, reasons: list[str], standing: Standing) -> dict[str, Any]:
        row = self.statistics.index[key]
        return {
            "key": key,
            "reasons": reasons,
            "since": self.since[key],
            "visits": min(int(self.statistics.visits[row]), self.window),
            "samples": int(standing.samples[row]),
            "score": _number(standing.scores[row]),
            **{VALUES[name]: _number(standing.values[name][row]) for name in MEASURES},
            "z": {name: _number(standing.z[name][row]) for name in MEASURES},
        }

    def _write(
        self, path: Path, iteration: int, judged: int, suspects: list[dict[str, Any]], standing: Standing
    ) -> None:
        others = {}
        compared = {VALUES[name]: values for name, values in standing.values.items()}
        for name, values in {"score": standing.scores, **compared}.items():
            measured = values[~standing.z["reward"].isnan() & ~values.isnan()]
            others[name] = median(measured) if len(measured) else None
        content = {
            "iteration": iteration,
            "seen": len(self.statistics),
            "judged": judged,
            "z": self.z,
            "others": others,
            "suspects": suspects,
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self.statistics.state_dict(), "since": dict(self.since), "named": sorted(self._named)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.statistics.load_state_dict(state_dict["statistics"])
        self.since = dict(state_dict["since"])
        self._named = {*state_dict.get("named", self.since)}  # earlier releases kept those flagged at the time


def visits_of(experience: Experience) -> list[Visit]:
    """One visit per prompt key of this rank's rows: rows of the data that repeat a prompt are one prompt.

    Only the policy's own responses count (``experience.own``): not those that the safety filter has replaced or left
    out. A prompt without one was not visited.
    """
    kl = row_kl(experience)
    scores: dict[str, list[float]] = {}
    kls: dict[str, list[float]] = {}
    of_rows = [math.nan] * len(experience) if kl is None else kl.tolist()
    own = [True] * len(experience) if experience.own is None else experience.own.tolist()
    rows = zip(own, experience.prompt_key, experience.require("scores").tolist(), of_rows, strict=True)
    for counts, key, score, distance in rows:
        if counts:
            scores.setdefault(key, []).append(score)
            kls.setdefault(key, []).append(distance)
    visits = []
    for key, values in scores.items():
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        visits.append(Visit(key, len(values), mean, squares, sum(kls[key]) / len(values)))
    return visits


def merged(visits: Iterable[Visit]) -> list[Visit]:
    """Visits of one key, from several ranks, as one: mean and squares of all their samples (Chan et al. 1983)."""
    found: dict[str, Visit] = {}
    for new in visits:
        old = found.get(new.key)
        if old is None:
            found[new.key] = new
            continue
        samples = old.samples + new.samples
        away = new.score - old.score
        squares = old.squares + new.squares + away**2 * old.samples * new.samples / samples
        score = (old.samples * old.score + new.samples * new.score) / samples
        kl = (old.samples * old.kl + new.samples * new.kl) / samples
        found[new.key] = Visit(new.key, samples, score, squares, kl)
    return list(found.values())


def _farthest(suspect: dict[str, Any]) -> float:
    return max(abs(suspect["z"][name]) for name in suspect["reasons"])


def _in_words(suspect: dict[str, Any]) -> str:
    parts = [
        f"{VALUES[name]} {suspect[VALUES[name]]:+.3g} (z {suspect['z'][name]:+.3g})" for name in suspect["reasons"]
    ]
    return f"{suspect['key']}: {', '.join(parts)}"


def _number(value: Any) -> float | None:
    """A number for JSON, which has no NaN."""
    number = float(value)
    return number if math.isfinite(number) else None
