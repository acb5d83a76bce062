"""What the crash matrix consists of: supervised runs, each with the faults that are planned for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_rlhf.supervise.classify import CLASSES
from tests.crash_matrix import damage
from tests.crash_matrix.faults import Fault

ITERATIONS = 8
_KILLED_IN = ("rollout", "reward", "update", "weights", "writing", "renaming")
_SAME = [f"supervise.policy.{kind}=[{','.join(['{}'] * 12)}]" for kind in CLASSES if kind != "configuration"]
"""Retries never change settings, however many faults one run has."""
_TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


@dataclass(frozen=True)
class Case:
    """One supervised run.

    Attributes:
        kind: the group that ``--kinds`` chooses.
        faults: in the order in which they strike.
        words: of the command, beside those of every run.
        gives_up: the class with which the supervisor gives up; ``None``: the training ends at its target.
        equal: whether weights and metrics must be those of the uninterrupted run.
        reference: name of that run.
        disk: MiB of the small disk; 0: none.
        on_disk: what is on it: ``checkpoints``, or ``run``, the whole folder of the run.
        server: whether the run is tracked by a server, started again after the last fault.
    """

    kind: str
    faults: Sequence[Fault]
    words: Sequence[str] = ()
    gives_up: str | None = None
    equal: bool = True
    reference: str = "one process"
    disk: int = 0
    on_disk: str = "checkpoints"
    server: bool = False


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        kills, terms, users: moments of SIGKILL, SIGTERM and SIGUSR1.
        damages: damaged checkpoints.
        together: at most so many faults in one supervised run.
    """

    kills: int = 30
    terms: int = 5
    users: int = 2
    damages: int = len(damage.WAYS)
    together: int = 8


REFERENCES: dict[str, Sequence[str]] = {"one process": (), "two processes": _TWO}
"""Uninterrupted runs: name -> words."""


@dataclass
class Plans:
    """Draws the moments.

    Args:
        seed: of the moments.
        size: how much.
    """

    seed: int = 0
    size: Size = field(default_factory=Size)

    def cases(self, kinds: Sequence[str] = ()) -> list[Case]:
        """The runs of these kinds, all without any; the moments of a kind do not depend on the others.

        Raises:
            ValueError: names a kind that does not exist.
        """
        unknown = sorted(set(kinds) - KINDS.keys())
        if unknown:
            raise ValueError(f"--kinds = {unknown[0]!r} is not allowed: {', '.join(KINDS)}")
        return [case for kind in kinds or KINDS for case in KINDS[kind](self, random.Random(f"{self.seed} {kind}"))]

    def _runs(self, kind: str, faults: Sequence[Fault]) -> list[Case]:
        """As few runs as can be, each with about the same number of faults, in the order of their iterations."""
        count = -(-len(faults) // self.size.together)
        groups = [faults[number::count] for number in range(count)]
        return [Case(kind, sorted(group, key=lambda fault: fault.iteration), _SAME) for group in groups]

    def kill(self, draw: random.Random) -> list[Case]:
        """SIGKILL: a tenth each before the first iteration and at the end, the others anywhere."""
        outside = max(1, self.size.kills // 15)
        faults = [Fault("kill -9", "start") for _ in range(outside)]
        faults += [Fault("kill -9", ("end", "teardown")[n % 2], ITERATIONS) for n in range(outside)]
        inside = self.size.kills - len(faults)
        iterations = [1 + n * (ITERATIONS - 1) // max(inside, 1) for n in range(inside)]
        for number, iteration in enumerate(iterations):
            place = _KILLED_IN[number % len(_KILLED_IN)]
            delay = 0.0 if place in ("writing", "renaming") else draw.choice((0.0, round(draw.uniform(0, 0.15), 3)))
            faults.append(Fault("kill -9", place, iteration, delay))
        return self._runs("kill", _spread(faults))

    def signals(self, draw: random.Random) -> list[Case]:
        """SIGTERM and SIGUSR1 to the training, not to its supervisor."""
        names = ["SIGTERM"] * self.size.terms + ["SIGUSR1"] * self.size.users
        draw.shuffle(names)
        faults = [
            Fault(name, draw.choice(("rollout", "reward", "update", "weights")), 1 + number % (ITERATIONS - 1))
            for number, name in enumerate(names)
        ]
        return self._runs("signals", _spread(faults))

    def checkpoints(self, draw: random.Random) -> list[Case]:
        """The newest checkpoint is damaged between a kill and the retry."""
        ways = list(damage.WAYS)[: self.size.damages]
        faults = [
            Fault(f"newest checkpoint {how}", draw.choice(("rollout", "update")), 3 + number // 2)
            for number, how in enumerate(ways)
        ]
        return self._runs("checkpoints", _spread(faults))

    def errors(self, draw: random.Random) -> list[Case]:
        """Out of memory, NaN in the weights, a reward's server that fails once."""
        faults = [
            Fault("out of memory", "update", 2),
            Fault("NaN in the weights", "update", draw.randint(3, 4)),
            Fault("reward fails once", "reward", draw.randint(5, 6)),
        ]
        return [Case("errors", faults, _SAME)]

    def hang(self, draw: random.Random) -> list[Case]:
        """A reward that sleeps."""
        return [Case("hang", [Fault("hang", "reward", draw.randint(2, 6))], [*_SAME, "supervise.hang_after=10"])]

    def nan(self, draw: random.Random) -> list[Case]:
        """A loss that is NaN once: its step is left out, without a crash, so weights differ from then on."""
        return [Case("nan", [Fault("NaN in the loss", "update", draw.randint(2, 6))], _SAME, equal=False)]

    def reward(self, _: random.Random) -> list[Case]:
        """A user's reward that raises at one prompt, always."""
        return [Case("reward", [], ["reward.terms.own.reward.wrong='7+'"], gives_up="user_code", equal=False)]

    def disk(self, _: random.Random) -> list[Case]:
        """A small disk that is full or read-only, for a while or for good."""
        full, again = Fault("full disk", "rollout", 4), Fault("room again", "start")
        read_only, writable = Fault("read-only folder", "rollout", 4), Fault("writable again", "start")
        return [
            Case("disk", [full, again], _SAME, disk=8),
            Case("disk", [full], gives_up="disk", equal=False, disk=8),
            Case("disk", [read_only, writable], _SAME),
            Case("disk", [full], gives_up="disk", equal=False, disk=8, on_disk="run"),
        ]

    def tracking(self, _: random.Random) -> list[Case]:
        """The tracking server is killed, then the training; the server comes back during the next attempt."""
        faults = [Fault("tracking server killed", "rollout", 3), Fault("kill -9", "update", 5)]
        return [Case("tracking", faults, _SAME, server=True)]

    def ranks(self, draw: random.Random) -> list[Case]:
        """One of two processes is killed."""
        faults = [Fault("kill -9", draw.choice(("rollout", "update")), draw.randint(2, 6), rank=1)]
        return [Case("ranks", faults, [*_SAME, *_TWO], reference="two processes")]


def _spread(faults: list[Fault]) -> list[Fault]:
    """In the order of iterations, so that every n-th of them are spread over the whole run."""
    return sorted(faults, key=lambda fault: fault.iteration)


KINDS: dict[str, Callable[[Plans, random.Random], list[Case]]] = {
    "kill": Plans.kill,
    "signals": Plans.signals,
    "checkpoints": Plans.checkpoints,
    "errors": Plans.errors,
    "hang": Plans.hang,
    "nan": Plans.nan,
    "reward": Plans.reward,
    "disk": Plans.disk,
    "tracking": Plans.tracking,
    "ranks": Plans.ranks,
}
"""Name for ``--kinds`` -> the runs."""
