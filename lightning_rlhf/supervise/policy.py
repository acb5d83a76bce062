"""What is tried after a crash: pure functions of what is known, the policy table and what was tried before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.supervise.settings import BACK, FACTOR, Settings, Step


@dataclass
class State:
    """What a supervisor remembers, in the run's folder.

    Attributes:
        attempts: one entry for each start of the training, oldest first.
        retries: since the start or since the last renewal.
        seen: crashes of each class in the present trouble, that is, each soon after the one before.
        crashed_at: iteration of the last crash; ``None`` before the first.
        changes: settings that the supervisor has changed, with the values in force.
        original: their values before the first change.
        pending: what the next start has to do: ``checkpoint`` (``None``: begin again) and why; ``None`` if the next
            start follows the command alone.
        given_up: whether the last attempt was given up: whoever starts the next one has looked at it.
    """

    attempts: list[dict[str, Any]] = field(default_factory=list)
    retries: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    crashed_at: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    original: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] | None = None
    given_up: bool = False


@dataclass(frozen=True)
class Decision:
    """What follows a crash.

    Attributes:
        retry: whether to start again.
        why: the reason for that, or for giving up.
        back: whether to leave out suspect checkpoints.
        changed: key -> old value, new value of what this step changes.
        left_out: keys of the step that cannot be changed in this run.
    """

    retry: bool
    why: str
    back: bool = False
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.retry:
            return f"giving up: {self.why}"
        changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in self.changed.items())
        what = f"with {changes}" if changes else "with the same settings"
        more = f" ({', '.join(self.left_out)} cannot be changed in this run)" if self.left_out else ""
        return f"trying again {what}{more}: {self.why}"


def decide(state: State, settings: Settings, kind: str, iteration: int, config: Mapping[str, Any]) -> Decision:
    """The answer to a crash; counts it in ``state``, and applies the changes there.

    Args:
        state: as it was during the attempt.
        settings: of the supervisor.
        kind: class of the crash.
        iteration: in which it came.
        config: of the attempt that crashed; empty if it did not get so far.
    """
    last, state.crashed_at = state.crashed_at, iteration
    if last is not None and iteration >= last + settings.renew_after:
        state.retries = 0
    soon = last is not None and iteration <= last + settings.soon
    if not soon:
        state.seen = {}
    number = state.seen.get(kind, 0)
    state.seen[kind] = number + 1
    steps = settings.policy.get(kind, ())
    if not steps:
        return Decision(False, f"{kind} is not retried")
    if number >= len(steps):
        times = "once" if number == 1 else f"{number} times"
        return Decision(
            False, f"{kind} came back soon after it was retried {times}, and the policy has no further step"
        )
    if state.retries >= settings.retries:
        return Decision(False, f"all retries are used ({settings.retries})")
    state.retries += 1
    changed, left_out = changes(steps[number], state, config)
    for key, (old, new) in changed.items():
        state.original.setdefault(key, old)
        state.changes[key] = new
    since = "the first crash" if last is None else f"the last one was in iteration {last}"
    why = f"step {number + 1} of {len(steps)} for {kind} ({since}), retry {state.retries} of {settings.retries}"
    return Decision(True, why, bool(steps[number].get(BACK, False)), changed, left_out)


def withdraw(state: State, settings: Settings, changed: Mapping[str, Sequence[Any]]) -> Decision:
    """The answer to an attempt that was refused because of the changes made for it: they are taken back."""
    for key, (old, _) in changed.items():
        state.changes[key] = old
        if old == state.original.get(key):
            del state.changes[key]
    if state.retries >= settings.retries:
        return Decision(False, f"all retries are used ({settings.retries})")
    state.retries += 1
    refused = f"the run does not accept the new {', '.join(changed)} (its message is above)"
    why = f"{refused}, retry {state.retries} of {settings.retries}"
    return Decision(True, why, changed={key: (new, old) for key, (old, new) in changed.items()})


def changes(step: Step, state: State, config: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """What a step changes (key -> old, new value), and the keys that the run lacks or that hold no number."""
    found: dict[str, tuple[Any, Any]] = {}
    left_out: list[str] = []
    for key, wanted in step.items():
        if key == BACK:
            continue
        old = state.changes.get(key, _value(config, key))
        new = _new(old, wanted)
        if new is None:
            left_out.append(key)
        elif new != old:
            found[key] = (old, new)
    return found, left_out


def _new(old: Any, wanted: Any) -> Any:
    if old is None:
        return None
    factor = FACTOR.fullmatch(wanted.strip()) if isinstance(wanted, str) else None
    if factor is None:
        return wanted
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        return None
    if isinstance(old, int):
        return max(1, math.floor(old * float(factor[1])))
    return float(f"{old * float(factor[1]):.12g}")


def _value(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
