"""Names that a checkpoint may be kept by, and the one that a misspelt name means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from lightning_rlhf.metrics.names import METRICS, find
from lightning_rlhf.metrics.names_evaluation import HELD_OUT

ALIKE = 0.85
"""How alike two names are of which one is held to be misspelt (``difflib``); ``my/reward_mean`` is no misspelling."""


def misspelt(name: str, terms: Iterable[str]) -> str | None:
    """The kit's metric that a name nearly is; ``None`` if it is a metric, or not like any: a metric of one's own.

    Args:
        name: of a metric.
        terms: names of the reward's terms, which evaluations measure.
    """
    known = [metric.name for metric in METRICS] + [f"eval/{measured}" for measured in (*HELD_OUT, *terms)]
    # A family such as eval/<name> takes every spelling; of the evaluation the names are known.
    if name in known or (find(name) is not None and not name.startswith("eval/")):
        return None
    return next(iter(get_close_matches(name, known, n=1, cutoff=ALIKE)), None)
