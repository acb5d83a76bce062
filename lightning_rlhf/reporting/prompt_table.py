"""The prompts of a run as a table, from its records: mean score and KL of each."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from lightning_rlhf.errors import InputError
from lightning_rlhf.reporting.prompt_records import FOLDER, DamagedPieces, pieces, read_records


@dataclass(frozen=True)
class RecordedPrompt:
    """What a run has recorded of one prompt.

    Attributes:
        key: of the prompt.
        text: as the model read it.
        visits: iterations that drew it.
        samples: its responses.
        score: their mean.
        kl: their mean KL(policy || reference), nats per token, estimator k3; ``None`` in a run without a reference.
        kl_excess: mean difference of its KL at a visit from that of the iteration's median prompt. The policy moves
            away from the reference as it learns, so a prompt that was drawn late has a larger ``kl`` for that alone.
    """

    key: str
    text: str
    visits: int
    samples: int
    score: float
    kl: float | None
    kl_excess: float | None


@dataclass
class _Visit:
    scores: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)


def refuse_without_records(run: Path) -> None:
    """Refuse a run's folder without records of samples.

    Raises:
        InputError: says how to switch them on.
    """
    if not pieces(run):
        raise InputError(f"{run / FOLDER} has no records of samples: the run needs callbacks=[default,prompt_records]")


def recorded_prompts(run: Path, damaged: DamagedPieces | None = None) -> list[RecordedPrompt]:
    """The prompts of a run, in the order in which they were drawn first.

    Responses that a safety filter replaced or left out (column ``safety``) do not count, nor a prompt without others.

    Args:
        run: the run's folder.
        damaged: is told of pieces that cannot be read, which are left out; ``None``: they are refused.

    Raises:
        InputError: the run has no records, no piece can be read, or one cannot and ``damaged`` is ``None``.
    """
    refuse_without_records(run)
    texts: dict[str, str] = {}
    visits: dict[int, dict[str, _Visit]] = defaultdict(lambda: defaultdict(_Visit))
    for row in read_records(run, columns=["prompt", "score", "kl_ref", "safety"], damaged=damaged):
        if row["safety"]:
            continue
        texts[row["key"]] = row["prompt"]
        visit = visits[row["iteration"]][row["key"]]
        visit.scores.append(row["score"])
        if row["kl_ref"] is not None:
            visit.kls.append(row["kl_ref"])
    if damaged is not None:
        damaged.refuse_if_all()
    found: dict[str, list[_Visit]] = defaultdict(list)
    excess: dict[str, list[float]] = defaultdict(list)
    for iteration in sorted(visits):
        means = {key: statistics.fmean(visit.kls) for key, visit in visits[iteration].items() if visit.kls}
        usual = statistics.median(means.values()) if means else 0.0
        for key, visit in visits[iteration].items():
            found[key].append(visit)
            if key in means:
                excess[key].append(means[key] - usual)
    return [_row(key, texts[key], own, excess.get(key, [])) for key, own in found.items()]


def _row(key: str, text: str, visits: list[_Visit], excess: list[float]) -> RecordedPrompt:
    scores = [score for visit in visits for score in visit.scores]
    kls = [kl for visit in visits for kl in visit.kls]
    return RecordedPrompt(
        key=key,
        text=text,
        visits=len(visits),
        samples=len(scores),
        score=statistics.fmean(scores),
        kl=statistics.fmean(kls) if kls else None,
        kl_excess=statistics.fmean(excess) if excess else None,
    )
