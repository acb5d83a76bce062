"""Stages that go on for long are said: by an injected clock, nothing here waits."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.reporting.progress import ProgressLines
from lightning_rlhf.reporting.stages import StageWatch
from lightning_rlhf.reporting.terminal import FILE, run_log
from tests.support import even_digits, fit, tiny_module


class Clock:
    """Seconds that pass only when told to; the watch looks at it every minute."""

    def __init__(self) -> None:
        self.now, self.said = 0.0, list[str]()
        self.watch = StageWatch(self.said.append, lambda: self.now)

    def minutes(self, count: int) -> list[str]:
        before = len(self.said)
        for _ in range(count):
            self.now += 60.0
            self.watch.look()
        return self.said[before:]


def test_a_stage_is_said_after_5_minutes_and_whenever_that_has_doubled() -> None:
    clock = Clock()
    assert clock.minutes(60) == [], "no stage has begun"
    clock.watch.begin("rollout")
    said = [f"note: rollout: going on for {minutes} minutes now, and not finished" for minutes in (5, 10, 20, 40)]
    assert clock.minutes(4) == [] and clock.minutes(75) == said
    clock.watch.begin("update")
    assert clock.minutes(4) == []
    clock.watch.begin("")
    assert clock.minutes(60) == []
    clock.watch.begin("update")
    assert clock.minutes(4) == [] and [text[6:12] for text in clock.minutes(4)] == ["update"], "it took 4 minutes"


def test_a_slow_run_is_no_hung_one() -> None:
    clock = Clock()
    clock.watch.begin("rollout")
    assert len(clock.minutes(9)) == 1
    clock.watch.begin("")
    clock.watch.begin("rollout")
    assert clock.minutes(17) == [] and "18 minutes" in clock.minutes(1)[0]


def test_the_thread_looks_until_it_is_ended() -> None:
    clock = Clock()
    clock.watch.begin("rollout")
    clock.now = 300.0
    answers = iter([False, False, True])
    clock.watch._watch(SimpleNamespace(wait=lambda seconds: next(answers)))  # type: ignore[arg-type]
    assert len(clock.said) == 1


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stage watch"]


@pytest.mark.parametrize("every", [5, None])
def test_every_stage_of_a_run_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture, every: int | None) -> None:
    """Generation, reward, update and sending the weights take six minutes each."""
    lines, clock = ProgressLines(1, every, terminal=False), Clock()
    lines._watch = clock.watch
    clock.watch._tell = lines._going_on

    def reward(batch: Any) -> list[float]:
        assert watching()
        clock.minutes(6)
        return even_digits(batch)

    module = tiny_module(iterations=1, reward=reward)
    update, generate, weights = module._update_loop.run, module.engine.generate, module.engine.update_weights

    def slow(work: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            clock.minutes(6)
            return work(*args, **options)

        return run

    module._update_loop.run = slow(update)  # type: ignore[method-assign]
    module.engine.generate, module.engine.update_weights = slow(generate), slow(weights)  # type: ignore[method-assign]
    with run_log(str(tmp_path), first=True):
        fit(module, [lines], folder=tmp_path, enable_progress_bar=True, limit_val_batches=1, val_check_interval=1)
    said = [line.split(": ")[1] for line in (tmp_path / FILE).read_text().splitlines() if "going on" in line]
    own = ["rollout", "rewards and scoring", "update", "new weights for the engine"]
    assert said == [*own, "evaluation", "evaluation"], "it answers and scores, so it is said after 10 minutes again"
    assert capsys.readouterr().out.count("going on for 5 minutes now") == (5 if every else 0)
    for thread in watching():
        thread.join()


def test_an_error_ends_the_watch() -> None:
    def fails(batch: Any) -> list[float]:
        assert watching()
        raise ZeroDivisionError

    with pytest.raises(Exception, match="ZeroDivisionError"):
        fit(tiny_module(iterations=1, reward=fails), [ProgressLines(1, terminal=False)], enable_progress_bar=True)
    for thread in watching():
        thread.join()
