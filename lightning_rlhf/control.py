"""How callbacks steer the update: verbs with reasons, and typed knobs with one owner each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_rlhf.metrics.names import check

Scope = Literal["minibatch", "iteration", "actor"]
SCOPES: dict[Scope, str] = {
    "minibatch": "weights and optimiser state before this minibatch's step",
    "iteration": "weights and optimiser state before this iteration's update",
    "actor": "the actor's weights alone, before this iteration's update or, until it begins, before the last one",
}
"""What a rollback may return to, narrowest first."""
_WINDOWS = {
    "skip_step": "in on_before_step",
    "rollback": "from on_experience_ready to on_ppo_epoch_end",
}
"""Verbs that the update obeys at certain points only, and the events in which they may be called."""


class TrainingFailed(RuntimeError):
    """A callback has found the run to be broken, see :meth:`Control.stop_training`. All ranks raise it together."""

    on_every_rank = True


@dataclass(frozen=True)
class Decision:
    """One call of a verb: which, why, in which iteration, and after how many optimiser steps."""

    verb: str
    reason: str
    iteration: int
    update: int


@dataclass
class Knob:
    """A number that callbacks may change while training runs.

    One owner sets the value. Anyone else may scale it for the current iteration through a multiplier; the value in
    force is ``value`` times all multipliers, kept inside the bounds.
    """

    name: str
    value: float
    minimum: float
    maximum: float
    integer: bool = False
    owner: str | None = None
    multipliers: dict[str, float] = field(default_factory=dict)

    @property
    def effective(self) -> float:
        scaled = self.value * math.prod(self.multipliers.values())
        bounded = min(max(scaled, self.minimum), self.maximum)
        return float(round(bounded)) if self.integer else bounded


class Control:
    """Verbs and knobs of one run. The update loop obeys; callbacks decide.

    A verb stays pending until it is obeyed; all but ``stop_training`` are cleared at the start of each iteration. Under
    several processes call a verb only on values that are equal on every rank (the ``stats`` handed to callbacks are).

    ========================  ==========================================================================
    verb                      obeyed
    ========================  ==========================================================================
    ``skip_step``             before the optimiser step: gradients are dropped, no weight or moment moves;
                              to be called in ``on_before_step``
    ``rollback``              after the callbacks of the event: back to one of :data:`SCOPES`; ends the
                              epochs unless it undoes one minibatch; to be called from
                              ``on_experience_ready`` to ``on_ppo_epoch_end``
    ``stop_epochs``           no further minibatch of this iteration is trained, none at all if it was
                              called before the first
    ``stop_training``         the run ends after this iteration and its checkpoint; with ``failed=True``
                              by raising :class:`TrainingFailed`, without a checkpoint
    ========================  ==========================================================================

    A verb called outside its events raises an error: if kept, it would act on another minibatch; if dropped, it would
    be counted without effect.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.update = 0
        self.knobs: dict[str, Knob] = {}
        self.decisions: list[Decision] = []
        self.counts: Counter[str] = Counter()
        self.reported: dict[str, float] = {}
        self.applied: dict[str, float] = {}
        """The logged value of every knob: as used in this iteration, with multipliers and bounds applied."""
        self._pending: dict[str, str] = {}
        self._rollback_to: Scope = "iteration"
        self._allowed: set[str] = set()
        self._stop_training: str | None = None
        self._failed = False

    # --- verbs -------------------------------------------------------------------------------------------------

    def stop_epochs(self, reason: str) -> None:
        self._call("stop_epochs", reason)

    def skip_step(self, reason: str) -> None:
        """Leave out the optimiser step of this minibatch.

        Raises:
            RuntimeError: called outside ``on_before_step``.
        """
        self._call("skip_step", reason)

    def rollback(self, reason: str, to: Scope = "iteration") -> None:
        """Return to an earlier state, see :data:`SCOPES`.

        The caller's class must announce the scope in ``rollback_scopes`` (see ``RLHFCallback``), or no copy of the
        weights exists to return to. Of several requests ``iteration`` wins over ``actor``, and both over
        ``minibatch``.

        Raises:
            ValueError: an unknown scope.
            RuntimeError: called outside the events from ``on_experience_ready`` to ``on_ppo_epoch_end``.
        """
        if to not in SCOPES:
            raise ValueError(f"rollback(to={to!r}): allowed are {', '.join(map(repr, SCOPES))}")
        order = ("minibatch", "actor", "iteration")
        wider = order.index(to) > order.index(self._rollback_to)
        first = "rollback" not in self._pending
        self._call("rollback", reason)
        if first or wider:
            self._rollback_to = to

    def stop_training(self, reason: str, *, failed: bool = False) -> None:
        """End the run after this iteration.

        Args:
            reason: what the user reads.
            failed: the run is broken, not finished: it ends with exit code 1, is tracked as FAILED, and saves no
                checkpoint of this iteration, so the newest one is from before. Wins over an ordinary stop.
        """
        if self._stop_training is None or (failed and not self._failed):
            self._stop_training, self._failed = reason, failed
        self._call("stop_training", reason)

    def _call(self, verb: str, reason: str) -> None:
        if verb in _WINDOWS and verb not in self._allowed:
            raise RuntimeError(f"control.{verb} ({reason}) acts only {_WINDOWS[verb]}; it was called elsewhere")
        self._record(verb, reason)
        if verb not in self._pending:  # several callbacks may ask for one step
            self.counts[verb] += 1
            self._pending[verb] = reason

    def note(self, verb: str, reason: str) -> None:
        """Count and log a decision that is carried out elsewhere, such as a knob that was set, with its reason."""
        self._record(verb, reason)
        self.counts[verb] += 1

    def _record(self, verb: str, reason: str) -> None:
        if not reason:
            raise ValueError(f"{verb} needs a reason: it is what the user reads afterwards")
        self.decisions.append(Decision(verb, reason, self.iteration, self.update))

    def report(self, name: str, value: float) -> None:
        """Log a callback's own number with this iteration's metrics.

        Call it from ``on_rollout_start`` to ``on_update_end``, or in ``on_evaluation_end``. Only rank 0's number is
        logged, so report numbers reduced over ranks, such as those in ``stats``. NaN means not measured and is not
        logged.

        Raises:
            UnknownMetricError: the name was not declared, see :func:`lightning_rlhf.metrics.names.register`.
        """
        check([name])
        if not math.isnan(value):
            self.reported[name] = value

    # --- used by the update loop -------------------------------------------------------------------------------

    @contextmanager
    def allow(self, *verbs: str) -> Iterator[None]:
        """Accept ``verbs`` inside this context; the code that opens it obeys them."""
        before = set(self._allowed)
        self._allowed |= set(verbs)
        try:
            yield
        finally:
            self._allowed = before

    def wants(self, verb: str) -> bool:
        """Whether ``verb`` was called and not yet obeyed."""
        return verb in self._pending

    def take(self, verb: str) -> str | None:
        """Mark a pending verb as obeyed and return its reason; ``None`` if it was not called."""
        return self._pending.pop(verb, None)

    def take_rollback(self) -> Scope | None:
        """Mark a pending rollback as obeyed and return its scope; ``None`` if there is none."""
        return self._rollback_to if self._pending.pop("rollback", None) is not None else None

    @property
    def training_stopped(self) -> str | None:
        """Why the run is to end, or ``None``."""
        return self._stop_training

    def raise_if_failed(self) -> None:
        """End the run if ``stop_training(failed=True)`` was called.

        Raises:
            TrainingFailed: gives the reason.
        """
        if self._failed:
            raise TrainingFailed(f"iteration {self.iteration}: {self._stop_training}")

    def begin_iteration(self, iteration: int) -> None:
        """Forget the verbs, decisions and multipliers of the iteration before."""
        self.iteration = iteration
        self._pending.clear()
        self.decisions.clear()
        self.reported.clear()
        for knob in self.knobs.values():
            knob.multipliers.clear()

    # --- knobs -------------------------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        value: float,
        *,
        minimum: float = 0.0,
        maximum: float = math.inf,
        integer: bool = False,
    ) -> None:
        """Declare a knob; called by the code that reads it."""
        if not minimum <= value <= maximum:
            raise ValueError(f"knob {name}: {value} lies outside [{minimum}, {maximum}]")
        self.knobs[name] = Knob(name, value, minimum, maximum, integer)

    def value(self, name: str) -> float:
        """The value in force, multipliers and bounds applied."""
        return self._knob(name).effective

    def freeze(self) -> None:
        """Record this iteration's knobs; values set later act in the next one. Called after the last epoch."""
        self.applied = {name: knob.effective for name, knob in self.knobs.items()}

    def own(self, name: str, owner: str) -> None:
        """Claim a knob, at set-up. A second owner is refused: two controllers on one knob fight."""
        knob = self._knob(name)
        if knob.owner not in (None, owner):
            raise ValueError(f"knob {name} already belongs to {knob.owner}; {owner} cannot own it too. Switch one off.")
        knob.owner = owner

    def set(self, name: str, value: float, owner: str) -> float:
        """Set a knob's value as its owner, within its bounds; returns the value kept."""
        knob = self._knob(name)
        if knob.owner != owner:
            raise ValueError(f"knob {name} belongs to {knob.owner}; {owner} may only scale it")
        if not math.isfinite(value):
            raise ValueError(f"knob {name}: {owner} set it to {value}")
        knob.value = min(max(value, knob.minimum), knob.maximum)
        return knob.value

    def scale(self, name: str, factor: float, by: str) -> None:
        """Multiply a knob for the rest of this iteration (logged as ``stability/<name>_multiplier``)."""
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"knob {name}: {by} scaled it by {factor}; a finite factor >= 0 is allowed")
        self._knob(name).multipliers[by] = factor

    def _knob(self, name: str) -> Knob:
        try:
            return self.knobs[name]
        except KeyError:
            raise KeyError(f"no knob {name!r}; there are: {', '.join(sorted(self.knobs)) or 'none'}") from None

    # --- checkpoint --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "update": self.update,
            "knobs": {name: knob.value for name, knob in self.knobs.items()},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore clocks and counts, and the values of **owned** knobs only.

        A knob nobody owns is a plain setting: on resume the configuration decides, so that a changed override acts.
        """
        self.iteration, self.update = state["iteration"], state["update"]
        self.counts = Counter(state["counts"])
        for name, value in state["knobs"].items():
            if name in self.knobs and self.knobs[name].owner is not None:
                self.knobs[name].value = value
