"""OveroptimisationStop: the rule by hand, real runs with a loophole, resumed and killed runs, and what it refuses."""

from __future__ import annotations

import math
import os
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlhf.callbacks import OveroptimisationStop, RLHFCallback
from lightning_rlhf.callbacks.overoptimisation_stop import by_prompt, gold_mean, paired_drop, spearman
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.errors import ConfigError, InputError
from lightning_rlhf.rewards import RewardBatch, RewardError, StoredScores
from lightning_rlhf.schema import check
from lightning_rlhf.settings import SettingError
from tests.ranks import run_ranks
from tests.support import (
    DecisionLog,
    Recorder,
    even_digits,
    fit,
    prompts,
    resume_equals_whole,
    same,
    tiny_module,
    weights,
)

NAN = math.nan
EACH: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
"""An evaluation after every iteration."""


def odd_digits(batch: RewardBatch) -> list[float]:
    """Share of odd digits: what a policy loses that is paid for even ones."""
    return [sum(c in "13579" for c in text) / max(len(text), 1) for text in batch.responses]


def rows(*gold: float, rewards: Any = None) -> list[tuple[str, float, float]]:
    return [(str(i), rewards[i] if rewards else float(i), value) for i, value in enumerate(gold)]


# --- the rule --------------------------------------------------------------------------------------------------------


def test_a_fall_by_hand() -> None:
    """Differences 0.2, 0.4, 0, 0.2 of four prompts: mean 0.2, deviation 0.1633, standard error 0.0816."""
    best, now = rows(0.8, 1.0, 0.6, 0.6), rows(0.6, 0.6, 0.6, 0.4)
    drop, error = paired_drop(by_prompt(best), by_prompt(now))
    assert (drop, error) == pytest.approx((0.2, math.sqrt(0.08 / 3 / 4)))
    stop = OveroptimisationStop(odd_digits, patience=2)
    assert [stop.judge(1, best), stop.judge(2, now)] == [None, None] and stop.falls == 1
    assert stop.judge(3, now) == (
        "over-optimised: the gold score 0.55 lies 0.2 (standard error 0.082) below its best of 0.75 after iteration 1, "
        "in 2 checks in a row"
    )
    assert stop.best is not None and stop.best["iteration"] == 1 and [h[0] for h in stop.history] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "now", "falls"),
    [
        ({}, (0.6, 0.6, 0.6, 0.4), 1),
        ({"standard_errors": 2.4}, (0.6, 0.6, 0.6, 0.4), 1),  # 0.2 = 2.45 x 0.0816
        ({"standard_errors": 2.5}, (0.6, 0.6, 0.6, 0.4), 0),
        ({"min_drop": 0.26}, (0.6, 0.6, 0.6, 0.4), 1),  # 0.26 x 0.75 = 0.195
        ({"min_drop": 0.27}, (0.6, 0.6, 0.6, 0.4), 0),
        ({}, (0.79, 0.99, 0.59, 0.59), 0),  # every prompt lost a little: certain, but small
        ({"min_drop": 0}, (0.79, 0.99, 0.59, 0.59), 1),
        ({}, (0.0, 1.4, 1.0, 0.0), 0),  # a mean of 0.15 less, and much noise
        ({"min_drop": 0, "standard_errors": 0}, (0.8, 1.0, 0.6, 0.6), 0),  # equal is no fall
        ({"min_drop": 0, "standard_errors": 0}, (0.8, 1.0, 0.6, 0.5), 1),
    ],
)
def test_what_counts_as_a_fall(settings: dict[str, float], now: tuple[float, ...], falls: int) -> None:
    stop = OveroptimisationStop(odd_digits, **settings)  # type: ignore[arg-type]
    stop.judge(1, rows(0.8, 1.0, 0.6, 0.6))
    stop.judge(2, rows(*now))
    assert stop.falls == falls


def test_scores_below_zero_fall_as_well() -> None:
    stop = OveroptimisationStop(odd_digits, patience=1)
    stop.judge(1, rows(-1.0, -1.0, -1.0))
    assert stop.judge(2, rows(-1.02, -1.02, -1.02)) is None, "by 2 % of the magnitude"
    assert "the gold score -1.04 lies 0.04" in str(stop.judge(3, rows(-1.04, -1.04, -1.04)))


def test_falls_count_in_a_row_from_the_best_check() -> None:
    """A recovery begins the count anew; so does a new best; a slow fall is measured from the best, not the last one."""
    stop = OveroptimisationStop(odd_digits, patience=3)
    seen = [stop.judge(i, rows(x, x)) or stop.falls for i, x in enumerate((0.5, 0.4, 0.49, 0.4, 0.4, 0.6, 0.5, 0.59))]
    assert seen == [0, 1, 0, 1, 2, 0, 1, 0]
    slow = [stop.judge(9 + i, rows(x, x)) for i, x in enumerate((0.585, 0.575, 0.565, 0.555))]
    assert slow[:3] == [None] * 3 and "below its best of 0.6 after iteration 5" in str(slow[3])


def test_a_check_that_measured_nothing_neither_counts_nor_interrupts() -> None:
    stop = OveroptimisationStop(odd_digits, patience=2, min_spearman=0.5)
    stop.judge(1, rows(1.0, 1.0, 1.0, NAN))
    stop.judge(2, rows(0.5, 0.5, 0.5, 0.5))
    before = (stop.falls, stop.uncorrelated, stop.best)
    for unmeasured in (rows(NAN, NAN, NAN), rows(NAN, NAN, NAN, 0.1), rows(0.2)):
        assert stop.judge(3, unmeasured) is None and (stop.falls, stop.uncorrelated, stop.best) == before
    assert stop.history[2] == [3, None, None]
    assert stop.judge(6, rows(0.5, 0.5, 0.5)) is not None


def test_prompts_with_gaps_are_compared_where_both_have_a_score() -> None:
    """The mean of all falls from 0.75 to 0.3, but on the two prompts in both nothing has changed."""
    stop = OveroptimisationStop(odd_digits, patience=1)
    stop.judge(1, rows(0.3, 0.3, NAN, 1.2, 1.2))
    assert stop.judge(2, rows(0.3, 0.3, 0.3, NAN, NAN)) is None and stop.falls == 0


def test_rows_of_one_prompt_count_by_their_mean() -> None:
    assert by_prompt([("b", 0, 1.0), ("a", 0, 3.0), ("b", 0, 2.0), ("c", 0, NAN)]) == {"a": 3.0, "b": 1.5}
    assert gold_mean([("b", 0, 1.0), ("b", 0, 2.0), ("c", 0, NAN), ("a", 0, 3.0)]) == 2.0
    assert math.isnan(gold_mean(rows(NAN))) and math.isnan(paired_drop({"a": 1.0}, {"a": 0.5})[0])


def test_the_rank_correlation_by_hand() -> None:
    """Ranks 1 2 3 4 against 1.5 1.5 3 4: covariance 4.5 / sqrt(5 x 4.5)."""
    assert spearman(rows(5.0, 5.0, 7.0, 9.0)) == pytest.approx(4.5 / math.sqrt(22.5), abs=1e-5)
    assert spearman(rows(3.0, 2.0, NAN, 1.0)) == pytest.approx(-1.0, abs=1e-5)
    assert math.isnan(spearman(rows(1.0, 1.0, 1.0))) and math.isnan(spearman(rows(1.0, 2.0, rewards=[3.0, 3.0])))
    assert math.isnan(spearman([])) and math.isnan(spearman(rows(1.0, NAN)))


def test_a_low_rank_correlation_ends_the_run() -> None:
    stop = OveroptimisationStop(odd_digits, patience=2, min_spearman=0.2)
    good, bad, flat = rows(1.0, 2.0, 3.0), rows(3.0, 2.0, 1.0), rows(2.0, 2.0, 2.0)
    assert [stop.judge(i, check) for i, check in enumerate((bad, good, bad, flat))] == [None] * 4
    assert stop.judge(4, bad) == (
        "over-optimised: the rank correlation of reward and gold score, -1.000, is below 0.2 in 2 checks in a row"
    )
    off = OveroptimisationStop(odd_digits, patience=1)
    assert off.judge(0, bad) is None and off.uncorrelated == 0


# --- in a run --------------------------------------------------------------------------------------------------------


class Noisy:
    """A gold score that uses what a check may not change, and counts."""

    def __init__(self, score: Any = odd_digits) -> None:
        self.score, self.calls = score, 0

    def __call__(self, batch: RewardBatch) -> list[float]:
        self.calls += 1
        torch.rand(3), random.random(), np.random.rand()
        assert not torch.is_grad_enabled()
        return self.score(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def loophole(**changes: Any) -> Any:
    """Paid for even digits, judged by odd ones: their share is 0.49, 0.27 and 0 after the first three iterations."""
    return tiny_module(**{"iterations": 12, "update": {"epochs": 4, "minibatch_size": 8}, **changes})


def test_a_run_whose_gold_score_falls_ends_and_names_its_best_checkpoint(tmp_path: Path) -> None:
    module, log, recorder = loophole(), DecisionLog(), Recorder()
    stop = OveroptimisationStop(Noisy(), patience=2)
    saver = IterationCheckpoint(tmp_path, 100, 1, "eval/gold_mean")
    trainer = fit(module, [stop, saver, recorder], folder=tmp_path, logger=log, enable_checkpointing=True, **EACH)
    ended = module.control.iteration
    [(iteration, reason)] = log.of("stop_training")
    assert iteration == ended < 12 and reason == module.control.training_stopped
    assert stop.best is not None
    best = tmp_path / f"iteration_{stop.best['iteration']:06d}.ckpt"
    assert reason.endswith(f"the checkpoint with the best gold score ({stop.best['mean']:.4g}) is {best}")
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {best.name, f"iteration_{ended:06d}.ckpt"}
    assert [check[0] for check in stop.history] == list(range(1, ended + 1))
    evaluated = recorder.of("on_evaluation_end")
    assert [(stats.iteration, stats.training) for stats in evaluated] == [(i, True) for i in range(1, ended + 1)]
    logged = trainer.callback_metrics
    assert float(logged["eval/gold_mean"]) == pytest.approx(stop.history[-1][1])
    assert float(logged["eval/reward_mean"]) == pytest.approx(evaluated[-1].reward_mean)
    assert "eval/gold_coverage" not in logged
    # The value is that of the weights in the file.
    content = torch.load(best, weights_only=True)
    fresh = loophole()
    fresh.load_state_dict(content["state_dict"], strict=False)  # the frozen reference is not in it
    again = OveroptimisationStop(odd_digits)
    trainer = fit(tiny_module(iterations=1), [again], max_epochs=0, **EACH)
    [metrics] = trainer.validate(fresh, datamodule=prompts(fresh), verbose=False)
    assert metrics["eval/gold_mean"] == pytest.approx(stop.best["mean"])


def test_the_gold_score_is_of_the_answers_that_the_reward_scores() -> None:
    """Once generated: with the reward as gold score both means are equal, and the rank correlation is 1."""
    module = loophole(iterations=2)
    asked: list[bool] = []
    generate = module.generate

    def counted(prompts: Any, *, greedy: bool = False) -> Any:
        asked.append(greedy)
        return generate(prompts, greedy=greedy)

    module.generate = counted
    trainer = fit(module, [OveroptimisationStop(even_digits)], **EACH)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert asked == [True, True], "one batch of held-out prompts, evaluated twice"
    assert logged["eval/gold_mean"] == pytest.approx(logged["eval/reward_mean"])
    assert logged["eval/gold_spearman"] == pytest.approx(1.0, abs=1e-4)


def test_checks_change_nothing_of_the_run() -> None:
    states = []
    for callbacks in ([], [OveroptimisationStop(Noisy(), patience=100)]):
        module = loophole(iterations=3)
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        fit(module, callbacks, **EACH)
        numpy = np.random.get_state(legacy=False)["state"]["key"].tolist()
        generators = (torch.get_rng_state().tolist(), random.getstate(), numpy)
        states.append((weights(module), module.control.state_dict(), generators))
    assert same(states[0][0], states[1][0]) and states[0][1:] == states[1][1:]


def test_the_evaluation_before_training_is_a_check_and_the_one_after_it_is_none(tmp_path: Path) -> None:
    module, stop = loophole(iterations=2, actor={"lr": 1e-9}), OveroptimisationStop(odd_digits)
    data = prompts(module)
    trainer = fit(loophole(iterations=1), [stop], max_epochs=0, **EACH)
    trainer.validate(module, datamodule=data, verbose=False)
    fit(module, [stop], data=data, limit_val_batches=1.0, val_check_interval=2, check_val_every_n_epoch=None)
    assert [check[0] for check in stop.history] == [0, 2] and stop.best is not None and stop.best["iteration"] == 0
    trainer.validate(module, datamodule=data, verbose=False)
    assert len(stop.history) == 2


def test_a_best_score_before_training_is_said(tmp_path: Path) -> None:
    """Of what was trained the best is named; there is no checkpoint of the beginning."""
    stop, saver = OveroptimisationStop(odd_digits), IterationCheckpoint(tmp_path, 100, 1, "eval/gold_mean")
    stop.best = {"iteration": 0, "mean": 0.9, "scores": {}}
    saver.best_model_path, saver.best_model_score = "a.ckpt", 0.8
    trainer: Any = type("", (), {"callbacks": [stop, saver]})()
    assert stop._kept(trainer) == "the checkpoint with the best gold score after training began (0.8) is a.ckpt"
    trainer.callbacks = [stop]
    assert stop._kept(trainer).startswith("no checkpoint of the best is kept")


def test_a_checkpoint_that_is_kept_by_another_number_is_warned_about(tmp_path: Path) -> None:
    saver = IterationCheckpoint(tmp_path, 100)
    with pytest.warns(UserWarning, match=r"callbacks\.checkpoint\.monitor = null, mode = max: the checkpoint with the"):
        fit(loophole(iterations=1), [OveroptimisationStop(odd_digits), saver], enable_checkpointing=True, **EACH)


def test_nothing_is_stopped_after_the_last_iteration() -> None:
    module = loophole(iterations=1)
    stop = OveroptimisationStop(odd_digits, patience=1)
    stop.best = {"iteration": 0, "mean": 9.0, "scores": dict.fromkeys((p.key for p in held_out(module)), 9.0)}
    fit(module, [stop], **EACH)
    assert stop.falls == 1 and module.control.training_stopped is None


def held_out(module: Any) -> Any:
    data = prompts(module)
    data.setup("fit")
    return data.validation_prompts


class Broken(RLHFCallback):
    """Finds at an evaluation that the run has failed."""

    def on_evaluation_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration == 2:
            module.control.stop_training("broken", failed=True)


def test_a_failure_found_in_an_evaluation_ends_the_run_without_a_checkpoint_of_its_iteration(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="iteration 2: broken"):
        fit(loophole(), [Broken(), IterationCheckpoint(tmp_path, 1)], enable_checkpointing=True, **EACH)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["iteration_000001.ckpt"]


# --- resumed, killed, several processes ------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_whole_one(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [OveroptimisationStop(Noisy(), patience=100, min_spearman=0.9)]

    [stop] = resume_equals_whole(tmp_path, callbacks, lambda: loophole(iterations=4), **EACH)
    assert [check[0] for check in stop.history] == [1, 2, 3, 4] and stop.falls and stop.gold.calls == 4


class Deadly(Noisy):
    """Kills its process in a check."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def __call__(self, batch: RewardBatch) -> list[float]:
        scores = super().__call__(batch)
        if self.calls == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores


def stopped_run(rank: int, folder: Path, resume: Path | None, call: int) -> dict[str, Any]:
    """A run until the stop: where it ends, why, and its weights."""
    module = loophole()
    stop = OveroptimisationStop(Deadly(call), patience=3)
    saver = IterationCheckpoint(folder, 1, None, "eval/gold_mean")
    trainer = {"folder": folder, "resume": resume, "enable_checkpointing": True}
    fit(module, [stop, saver, RNGState()], **trainer, **EACH)  # type: ignore[arg-type]
    reason = str(module.control.training_stopped).replace(str(folder), "")
    return {"reason": reason, "state": stop.state_dict(), "weights": weights(module), "control": module.control}


def test_a_run_killed_in_a_check_ends_as_the_whole_one(tmp_path: Path) -> None:
    for name in ("whole", "killed", "ranks"):
        (tmp_path / name).mkdir()
    whole = stopped_run(0, tmp_path / "whole", None, 0)
    assert whole["control"].iteration >= 4, "killed in the check of iteration 3"
    run_ranks(
        stopped_run, tmp_path / "killed", None, 3, folder=tmp_path / "ranks", world_size=1, ends=[-9],
        process_group=False,
    )  # fmt: skip
    newest = max((tmp_path / "killed").glob("iteration_*.ckpt"))
    assert newest.stem == "iteration_000002"
    resumed = stopped_run(0, tmp_path / "killed", newest, 0)
    assert resumed["reason"] == whole["reason"] and resumed["state"] == whole["state"]
    assert same(resumed["weights"], whole["weights"])
    assert resumed["control"].state_dict() == whole["control"].state_dict()


def test_each_rank_gets_the_state_of_its_own_gold_scorer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank stands for itself here: only what is gathered and taken back is looked at."""
    module = "lightning_rlhf.callbacks.overoptimisation_stop"
    scorer = Noisy()
    stop = OveroptimisationStop(scorer)
    monkeypatch.setattr(f"{module}.gather_objects", lambda mine: [mine, {"calls": 5}])
    scorer.calls = 3
    saved = stop.state_dict()
    monkeypatch.setattr(f"{module}.place", lambda: (1, 2))
    stop.load_state_dict(saved)
    assert scorer.calls == 5
    monkeypatch.setattr(f"{module}.place", lambda: (0, 1))
    with pytest.warns(UserWarning, match="of 2 processes, and this run has 1: each goes on with that of process 0"):
        stop.load_state_dict(saved)
    assert scorer.calls == 3
    with pytest.raises(InputError, match=r"overoptimisation_stop\.gold: Noisy cannot take up the state .*KeyError"):
        stop.load_state_dict(saved | {"gold": [{"other": 1}]})


def test_a_stop_at_the_best_check_names_no_earlier_checkpoint() -> None:
    stop = OveroptimisationStop(odd_digits, min_spearman=1.0, patience=1)
    saver = IterationCheckpoint("nowhere", monitor="eval/gold_mean", mode="max")
    saver.best_model_path, saver.best_model_score = "earlier.ckpt", 0.1
    trainer: Any = SimpleNamespace(callbacks=[stop, saver])
    stop.judge(1, rows(0.1, 0.1, 0.2))
    assert stop.judge(2, rows(0.9, 0.8, 0.7)) is not None
    assert stop._kept(trainer) == "this check is the best, and its checkpoint is written now"
    stop.judge(3, rows(0.5, 0.5, 0.4))
    assert stop._kept(trainer).endswith("(0.1) is earlier.ckpt")


def test_a_stop_at_the_best_check_after_a_better_beginning_names_no_earlier_checkpoint() -> None:
    """Gold 0.52 before training, then 0.33, then 0.38, where the run ends."""
    stop = OveroptimisationStop(odd_digits, patience=2, standard_errors=0.0)
    saver = IterationCheckpoint("nowhere", monitor="eval/gold_mean", mode="max")
    saver.best_model_path, saver.best_model_score = "iteration_000001.ckpt", 0.33
    trainer: Any = SimpleNamespace(callbacks=[stop, saver])
    for iteration, gold in ((0, 0.52), (1, 0.33), (2, 0.38)):
        reason = stop.judge(iteration, rows(gold, gold, gold))
    assert reason is not None and "best of 0.52 after iteration 0" in reason
    assert stop._kept(trainer) == "this check is the best after training began, and its checkpoint is written now"
    stop.judge(3, rows(0.38, 0.38, 0.38))
    assert stop._kept(trainer).endswith("after training began (0.33) is iteration_000001.ckpt"), "as the saver knows it"


def before_training(**trainer: Any) -> tuple[Any, Any, OveroptimisationStop]:
    """A module with its data, seven prompts of them held out, and the callback after the evaluation of the start."""
    module = loophole(actor={"lr": 3e-4}, update={"epochs": 4, "minibatch_size": 16})
    data, stop = prompts(module, per_iteration=16), OveroptimisationStop(Noisy(), min_drop=0, standard_errors=0)
    data.validation_limit = 7  # with two ranks four on one, three on the other
    fit(loophole(iterations=1), [stop], max_epochs=0, **EACH, **trainer).validate(module, data, verbose=False)
    return module, data, stop


class FailsOnRank1:
    def __call__(self, batch: RewardBatch) -> list[float]:
        return [NAN if torch.distributed.get_rank() == 1 else 1.0] * len(batch)


def two_ranks(rank: int) -> dict[str, Any]:
    both: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    module, data, stop = before_training(**both)
    log = DecisionLog()
    fit(module, [stop], data=data, logger=log, **both, **EACH)
    failed, said = loophole(iterations=1, update={"minibatch_size": 16}), "nothing"
    broken = OveroptimisationStop(FailsOnRank1())
    try:
        fit(failed, [broken], data=prompts(failed, per_iteration=16), **both, **EACH)
    except RewardError as error:
        said = str(error)
    return {"decided": log.rows, "state": stop.state_dict(), "said": said}


def test_two_ranks_decide_alike_on_the_answers_of_both(tmp_path: Path) -> None:
    """The first check is that of one process; a scorer that fails on one rank ends both with its error."""
    first, second = run_ranks(two_ranks, folder=tmp_path)
    assert first == second
    assert [row["verb"] for row in first["decided"]] == ["stop_training"] and first["state"]["falls"] == 2
    assert "callbacks.overoptimisation_stop.gold: nan is not a finite number, for row 0" in first["said"]
    _, _, alone = before_training()
    assert alone.history == first["state"]["history"][:1] and alone.best is not None
    assert len(alone.best["scores"]) == 7 and alone.history[0][1]


# --- what is refused -------------------------------------------------------------------------------------------------


def raises(batch: RewardBatch) -> list[float]:
    raise KeyError("human_score")


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        (lambda batch: [NAN] * len(batch), r"gold: nan is not a finite number, for row 0 of the batch \("),
        (lambda batch: [math.inf] * len(batch), r"gold: inf is not a finite number, for row 0"),
        (lambda batch: [1.0] * 3, r"gold: 3 numbers for 8 responses"),
        (lambda batch: 1.0, r"gold: a sequence of 8 numbers is wanted, not 1\.0"),
        (raises, r"gold: KeyError: 'human_score' \(columns of the row: .*answer.*\), for row 0 of the batch"),
    ],
)
def test_a_gold_scorer_that_fails_is_named_with_its_row(gold: Any, said: str) -> None:
    with pytest.raises(RewardError, match=rf"^callbacks\.overoptimisation_stop\.{said}"):
        fit(loophole(iterations=1), [OveroptimisationStop(gold)], **EACH)


def test_rows_that_a_gold_scorer_cannot_score_are_found_before_training() -> None:
    class Wants:
        def check_row(self, row: Any) -> None:
            raise RewardError("no column 'reference'")

        __call__ = odd_digits

    module = loophole(iterations=1)
    said = r"8 rows cannot be used:\n  callbacks\.overoptimisation_stop\.gold, .*: no column 'reference'"
    with pytest.raises(RewardError, match=said):
        fit(module, [OveroptimisationStop(Wants())], **EACH)
    assert module.control.iteration == 0


def test_without_gold_scorer_held_out_prompts_or_evaluations_it_is_refused() -> None:
    module = loophole(iterations=3)
    with pytest.raises(InputError, match=r"callbacks\.overoptimisation_stop\.gold = null: .*StoredScores"):
        fit(module, [OveroptimisationStop()], **EACH)
    data = PromptDataModule(
        ArithmeticTask(max_value=20), None, tokenizer=module.tokenizer, prompts_per_iteration=8, iterations=3
    )
    with pytest.raises(InputError, match=r"data\.validation = null: .* allowed are data\.validation=FILE"):
        fit(module, [OveroptimisationStop(odd_digits)], data=data, **EACH)
    for every, shown in ((4, "null"), (9, "9")):
        with pytest.raises(InputError, match=rf"evaluate_every = {shown}: .* up to iterations = 3, such as"):
            fit(module, [OveroptimisationStop(odd_digits)], **EACH | {"val_check_interval": every})
    assert module.control.iteration == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gold": 3}, r"gold = 3 is not allowed: a callable that scores .* needs _partial_: true"),
        ({"patience": 0}, r"patience = 0 is not allowed: a whole number >= 1"),
        ({"min_drop": -0.1}, r"min_drop = -0\.1 is not allowed: a finite number >= 0"),
        ({"standard_errors": NAN}, r"standard_errors = nan is not allowed"),
        ({"min_spearman": 1.5}, r"min_spearman = 1\.5 is not allowed: a finite number >= -1 and <= 1, or null"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=rf"callbacks\.overoptimisation_stop\.{said}"):
        OveroptimisationStop(**settings)


# --- stored scores ---------------------------------------------------------------------------------------------------


def stored(module: Any, share: float) -> StoredScores:
    """Scores of the answers that the policy gives now to a share of the held-out prompts."""
    found: list[Any] = []

    class Keeps(RLHFCallback):
        def on_evaluation_scored(self, trainer: Any, module: Any, batch: RewardBatch, answers: Any) -> None:
            found.append(batch)

    trainer = fit(loophole(iterations=1), [Keeps()], max_epochs=0, **EACH)
    trainer.validate(module, datamodule=prompts(module), verbose=False)
    [batch] = found
    given = [
        {"prompt": row["prompt"], "response": response, "score": float(i)}
        for i, (row, response) in enumerate(zip(batch.rows, batch.responses, strict=True))
    ]
    return StoredScores(given[: round(share * len(given))])


def test_stored_scores_measure_the_answers_that_they_have() -> None:
    """Half of the eight answers, scored 0 to 3; the weights hardly move."""
    module = loophole(iterations=2, actor={"lr": 1e-9})
    stop = OveroptimisationStop(stored(module, 0.5))
    trainer = fit(module, [stop], **EACH)
    assert float(trainer.callback_metrics["eval/gold_coverage"]) == 0.5
    assert float(trainer.callback_metrics["eval/gold_mean"]) == 1.5
    assert stop.best is not None and len(stop.best["scores"]) == 4


def test_stored_scores_of_no_answer_are_refused_at_the_first_check_and_are_gaps_later() -> None:
    other = StoredScores([{"prompt": "1+1=", "response": "no such answer", "score": 1.0}])
    with pytest.raises(
        InputError, match=r"callbacks\.overoptimisation_stop\.gold has a score for none of the 8 answers"
    ):
        fit(loophole(iterations=1), [OveroptimisationStop(other)], **EACH)
    stop = OveroptimisationStop(other)
    stop.best = {"iteration": 0, "mean": 1.0, "scores": {"a": 1.0, "b": 1.0}}
    trainer = fit(loophole(iterations=2), [stop], **EACH)
    assert float(trainer.callback_metrics["eval/gold_coverage"]) == 0.0
    assert "eval/gold_mean" not in trainer.callback_metrics and stop.history == [[1, None, None], [2, None, None]]


def test_a_file_of_stored_scores_that_is_not_there_is_found_before_any_work(compose: Any) -> None:
    rows = "{_target_: lightning_rlhf.data.JSONLSource, path: none.jsonl}"
    gold = f"{{_target_: lightning_rlhf.rewards.StoredScores, rows: {rows}}}"
    with pytest.raises(
        ConfigError, match=r"overoptimisation_stop\.gold\.rows\.path = 'none\.jsonl'\n.*there is no file"
    ):
        check(compose("callbacks=overoptimisation_stop", f"callbacks.overoptimisation_stop.gold={gold}"))


# --- the command line, and a planted loophole ------------------------------------------------------------------------


def test_one_line_of_the_command_line_and_what_the_run_prints(
    compose: Any, tiny_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_rlhf import cli
    from lightning_rlhf.train import train

    gold = "{_target_: tests.callbacks.test_overoptimisation_stop.odd_digits, _partial_: true}"
    even = "+reward.terms.even={weight: 1.0, reward: {_target_: tests.support.even_digits}}"
    small = ["model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "model.lr.actor=0.02"]
    small += ["data.validation.size=24", "module.actor.warmup_iterations=0", "module.update.epochs=4", "logger=none"]
    metrics = train(
        compose(
            *tiny_run, *small, even, "callbacks=[default,overoptimisation_stop]", "callbacks.kl_early_stop=null",
            f"callbacks.overoptimisation_stop.gold={gold}", "evaluate_every=1", "iterations=20",
            "data.prompts_per_iteration=16", "callbacks.overoptimisation_stop.min_drop=0",
        )
    )  # fmt: skip
    said = capsys.readouterr().out
    [stopped] = [line for line in said.splitlines() if line.startswith("stopped early: over-optimised: ")]
    [best] = [line for line in said.splitlines() if line.startswith("best checkpoint by eval/gold_mean (")]
    path = best.rpartition(": ")[2]
    assert Path(path).is_file() and path.startswith(str(tmp_path)) and stopped.endswith(path)
    assert metrics["clock/iteration"] < 20 and "eval/gold_mean" in metrics
    score = float(best.partition("(")[2].partition(")")[0])
    page = (Path(__file__).resolve().parents[2] / "docs" / "overoptimisation.md").read_text(encoding="utf-8")
    [words] = re.findall(r"lightning-rlhf eval checkpoint=\S+ \\\n +(.*)", page)
    term = words.replace("my_parts.Judge", "tests.callbacks.test_overoptimisation_stop.odd_digits").split()
    assert cli.main(["eval", f"checkpoint={path}", *term]) == 0
    [evaluated] = re.findall(r"eval/gold +(\S+)", capsys.readouterr().out)
    assert float(evaluated) == pytest.approx(score, rel=1e-3), "the term of the docs gives the gold score"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["magic", "length"])
def test_a_planted_loophole_is_stopped_before_a_tenth_is_lost(tmp_path: Path, kind: str) -> None:
    from benchmarks.overoptimised import again, run

    module, trainer, stop = run(kind, 1, tmp_path / "run")
    saver: Any = trainer.checkpoint_callback
    assert module.control.iteration < 30 and stop.best is not None
    assert saver.best_model_path in str(module.control.training_stopped)
    golds = [gold for _, gold, _ in stop.history if gold is not None]
    assert golds[-1] > 0.9 * max(golds)
    assert again(saver.best_model_path) > 0.98 * max(golds)
