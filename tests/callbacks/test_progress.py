"""KLGuard with target null: it does not brake a run that learns, whatever its KL, and acts on a KL that grows while
the score falls or stagnates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks import KLGuard
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.control import Control
from tests.support import (
    FAST,
    DecisionLog,
    experience_stats,
    fit,
    minibatch_stats,
    part_of,
    same,
    tiny_module,
    tiny_policy,
    update_stats,
)


class Run:
    """Drives a guard through iterations whose samples have a given score and KL; no model is trained."""

    def __init__(self, **guard: Any) -> None:
        self.guard, self.control = KLGuard(**guard), Control()
        self.control.register("kl_coefficient", 0.1)
        self.module: Any = SimpleNamespace(control=self.control, reference=object())

    def iterate(self, points: Iterable[tuple[float, float]], *, spread: float = 0.5, unit: float = 1.0) -> list[str]:
        """The decisions for each (score, kl/ref)."""
        decided = []
        for score, kl in points:
            control, nothing = self.control, None
            control.begin_iteration(control.iteration + 1)
            self.guard.on_rollout_start(nothing, self.module, nothing)  # type: ignore[arg-type]
            stats = experience_stats(score_mean=unit * score, score_std=unit * spread, kl_ref=kl)
            with control.allow("rollback"):
                self.guard.on_experience_ready(nothing, self.module, nothing, stats)  # type: ignore[arg-type]
            self.guard.on_update_end(nothing, self.module, update_stats())  # type: ignore[arg-type]
            decided.append("+".join(decision.verb for decision in control.decisions))
        return decided


def ramp(start: float, end: float, count: int) -> list[float]:
    return [start + (end - start) * i / (count - 1) for i in range(count)]


LEARNT = list(zip([*ramp(0.4, 1.0, 20), *[1.0] * 10], [*ramp(0.0, 0.5, 20), *[0.5] * 10], strict=True))
"""Scores and KL of a run that has learnt: a score of 1 for a KL of 0.5."""


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("far", [0.05, 0.5, 8.0])
def test_a_run_that_learns_is_never_braked_whatever_kl_it_takes(unit: float, far: float) -> None:
    """The quickstart needs 0.5 nats per token, another task 0.05 or 8; the reward may have any unit."""
    run, noise = Run(), [0.03 * math.sin(12.9898 * i) for i in range(80)]
    scores = [score + e for score, e in zip(ramp(0.4, 1.4, 60) + [1.4] * 20, noise, strict=True)]
    decided = run.iterate(zip(scores, ramp(0.0, far, 80), strict=True), unit=unit)
    assert set(decided) == {""} and run.guard.multiplier == 1.0


def test_kl_that_runs_while_the_score_falls_is_braked_and_the_brake_lets_go() -> None:
    run = Run()
    assert set(run.iterate(LEARNT)) == {""}
    falling = run.iterate(zip(ramp(1.0, 0.4, 12), ramp(0.5, 1.4, 12), strict=True))
    assert falling[-1] == "raise_kl_coefficient" and run.guard.multiplier >= 4
    run.iterate([(1.0, 0.5)] * 20)
    assert run.guard.multiplier == 1.0


def test_kl_that_runs_while_the_score_stands_still_is_braked_softly_from_three_times_on() -> None:
    run = Run()
    run.iterate(LEARNT)
    assert set(run.iterate([(0.98, 1.2)] * 8)) == {""}
    assert "raise_kl_coefficient" in run.iterate([(0.98, 3.0)] * 8)
    assert "rollback" not in str(run.control.counts)


def test_a_score_that_drops_at_once_with_the_kl_undoes_the_last_update() -> None:
    """0.6 of a deviation within one iteration counts before the average follows. Then there is nothing to undo."""
    run = Run()
    run.iterate(LEARNT)
    assert run.iterate([(0.7, 5.0)]) == ["stop_epochs+rollback+raise_kl_coefficient"]
    [first, *_] = run.control.decisions
    assert "at the best score" in first.reason and "score now 0.700" in first.reason
    assert run.iterate([(0.99, 0.5)])[0] in ("", "raise_kl_coefficient")


def test_without_a_fall_of_the_score_no_kl_undoes_anything() -> None:
    run = Run()
    run.iterate(LEARNT)
    assert "rollback" not in run.iterate([(1.3, 50.0)])[0]


def test_below_one_nat_per_response_a_fall_does_not_brake() -> None:
    """Responses of 4 tokens: 0.25 nats per token are one nat per response; the soft limit is 1.5 times that."""
    run = Run()
    assert set(run.iterate(zip(ramp(1.0, 0.2, 20), [0.3] * 20, strict=True))) == {""}
    assert set(run.iterate(zip(ramp(0.2, 0.1, 20), [0.9] * 20, strict=True))) >= {"raise_kl_coefficient"}


def test_harder_prompts_do_not_count_as_a_fall_for_ever() -> None:
    """The score drops by a deviation and stays there; the KL was needed before, too. The best point is forgotten."""
    run = Run()
    run.iterate(LEARNT)
    run.iterate([(0.5, 0.9)] * 150)
    assert run.guard.multiplier == 1.0


def test_one_update_that_goes_too_far_is_undone_whatever_the_score() -> None:
    """A real run with steps far too large: the first step is undone before the second."""
    module, log = tiny_module(iterations=1, **FAST), DecisionLog()
    actor = part_of(module, "actor")
    fit(module, [KLGuard(jump=0.01)], logger=log)
    assert same(actor, part_of(module, "actor"))
    [(_, reason)] = log.of("rollback")
    assert "over 0.01 within one update in epoch 0, minibatch 1" in reason


def test_kl_old_from_before_the_first_step_is_not_attributed_to_the_update() -> None:
    """As with noise on hidden states, or old log-probabilities of the engine."""
    run = Run(jump=0.3)
    with run.control.allow("skip_step", "rollback"):
        for before, after, braked in ((0.5, 0.7, False), (0.5, 0.9, True)):
            run.control.begin_iteration(run.control.iteration + 1)
            run.guard.on_experience_ready(None, run.module, None, experience_stats())  # type: ignore[arg-type]
            for kl_old in (before, after):
                stats = replace(minibatch_stats(), kl_old=kl_old)
                run.guard.on_before_step(None, run.module, stats)  # type: ignore[arg-type]
                run.guard.on_minibatch_end(None, run.module, stats)  # type: ignore[arg-type]
            assert run.control.wants("rollback") is braked


def test_with_target_null_no_reference_is_needed() -> None:
    module = tiny_module(policy=tiny_policy(reference="none"), iterations=1, **FAST)
    fit(module, [KLGuard(jump=0.01)])
    assert module.control.counts["rollbacks"] == 1


def test_state_is_plain_numbers_and_comes_back() -> None:
    first, second = Progress(), Progress()
    for score, kl in ((0.4, 0.1), (0.6, 0.2), (0.5, 0.3)):
        first.observe(experience_stats(score_mean=score, kl_ref=kl))
    assert all(isinstance(value, (int, float)) for value in first.state_dict().values())
    second.load_state_dict(first.state_dict())
    assert vars(first) == vars(second)
    assert (first.best, first.best_kl) == pytest.approx((0.5, 0.2)), "means of what there is: 0.4, 0.5, 0.5"
