"""The reward of a run: a weighted sum of named terms."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.bounds import is_number, too_large
from lightning_rlhf.faults import Faults
from lightning_rlhf.rewards.base import (
    Reward,
    RewardBatch,
    RewardError,
    evaluate,
    has_state,
    in_words,
    origin,
    restore_state,
)

log = logging.getLogger(__name__)

RESERVED = frozenset(
    {"reward_mean", "response_length_mean", "truncated_fraction", "gold_mean", "gold_spearman", "gold_coverage"}
)
"""Metric names that evaluation and its callbacks use themselves, beside those of the terms."""


@dataclass(frozen=True)
class RewardOutput:
    """The weighted sum and its terms.

    Attributes:
        total: ``[B]`` float32, the weighted sum.
        components: each term's own numbers ``[B]`` float32, before weighting.
    """

    total: Tensor
    components: dict[str, Tensor]


class Term(NamedTuple):
    """One summand."""

    weight: float
    reward: Reward


class CompositeReward:
    """Sum of ``weight * reward`` over named terms.

    Args:
        terms: ``{name: {"reward": ..., "weight": 1.0}}``. A term of weight 0 is only reported, ``None`` is no term.

    Raises:
        RewardError: there is no term, or a term cannot be used.

    Example:
        >>> reward = CompositeReward({"short": {"reward": lambda batch: [-float(len(r)) for r in batch.responses]}})
    """

    def __init__(self, terms: Mapping[str, Mapping[str, Any] | None]) -> None:
        given = {str(name): block for name, block in terms.items() if block is not None}
        if not given:
            raise RewardError(f"reward.terms {'holds only null' if terms else 'is empty'}: at least one term is needed")
        self.terms = {name: _term(name, block) for name, block in given.items()}

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Score ``B`` responses; every term must give one finite number for each.

        Raises:
            RewardError: a term returns something else, or the weighted sum overflows float32; names the terms.
        """
        components = {name: evaluate(name, term.reward, batch) for name, term in self.terms.items()}
        total = torch.zeros(len(batch), dtype=torch.float32)
        for name, values in components.items():
            total += self.terms[name].weight * values
        for index in (~total.isfinite()).nonzero().flatten().tolist()[:1]:
            sum_ = " + ".join(f"{self.terms[name].weight:g} * {v[index]:g} ({name})" for name, v in components.items())
            raise RewardError(
                f"the weighted sum of the reward terms is {total[index]:g}, which is not a finite number of float32, "
                f"{origin(batch.rows[index])}: {sum_}; scale the terms or set smaller weights "
                "(reward.terms.NAME.weight)"
            )
        return RewardOutput(total, components)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check before training that every data row has what the terms need, such as an answer.

        Raises:
            RewardError: rows cannot be scored; names the term, the rows' places of origin and what is missing.
        """
        checks = {name: getattr(term.reward, "check_row", None) for name, term in self.terms.items()}
        faults = Faults()
        cause: Exception | None = None
        for row in rows:
            reasons = []
            for name, check in checks.items():
                if check is not None:
                    try:
                        check(row)
                    except Exception as error:  # a user's term may raise anything
                        reasons.append(f"reward term {name!r}, {origin(row)}: {in_words(error, row)}")
                        cause = cause or error
            if reasons:
                faults.add("; ".join(reasons))
        if faults:
            raise RewardError(str(faults)) from cause

    def state_dict(self) -> dict[str, Any]:
        """The states of the terms that have one, by name, for the checkpoint."""
        return {name: reward.state_dict() for name, reward in self._with_state().items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a term without a state there starts afresh, which one line says."""
        mine = self._with_state()
        for name, reward in mine.items():
            if name in states:
                restore_state(f"reward.terms.{name}", reward, states[name])
        if fresh := [f"reward.terms.{name}" for name in mine if name not in states]:
            log.warning("the checkpoint holds no state of %s: it starts afresh", ", ".join(fresh))

    def _with_state(self) -> dict[str, Any]:
        """Rewards that can save and restore a state."""
        return {name: term.reward for name, term in self.terms.items() if has_state(term.reward)}

    def to(self, device: torch.device | str) -> CompositeReward:
        """Move reward models to ``device``."""
        for term in self.terms.values():
            move = getattr(term.reward, "to", None)
            if move is not None:
                move(device)
        return self


def _term(name: str, block: Mapping[str, Any]) -> Term:
    key = f"reward.terms.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in RESERVED:
        raise RewardError(
            f"{key}: a term's name becomes a metric's name; letters, digits, '_', '.' and '-' are allowed, "
            f"and none of {', '.join(sorted(RESERVED))}"
        )
    if not isinstance(block, Mapping) or "reward" not in block:
        raise RewardError(f"{key} must be a block {{weight: 1.0, reward: {{_target_: ...}}}}, not {block!r:.80}")
    for unknown in sorted(set(block) - set(Term._fields)):
        near = get_close_matches(unknown, Term._fields, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(f"{key}.{unknown} is not known: {hint}known keys: {', '.join(Term._fields)}")
    weight, reward = block.get("weight", 1.0), block["reward"]
    if not is_number(weight):
        raise RewardError(f"{key}.weight = {weight!r} is not allowed: a finite number{too_large(weight)}")
    if not callable(reward):
        raise RewardError(
            f"{key}.reward = {reward!r:.80} cannot be called with a batch; "
            "a plain function needs `_partial_: true` beside its `_target_`"
        )
    return Term(float(weight), reward)
