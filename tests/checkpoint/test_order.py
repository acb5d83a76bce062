"""The order of an iteration: update, metrics, evaluation if due, checkpoint; and the checkpoint of an aborted run."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import AdaptiveKL, GradientMonitor, RLHFCallback
from lightning_rlhf.checkpoint import CheckpointError, IterationCheckpoint, RNGState, latest_valid
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import RewardBatch, RewardError
from tests.ranks import run_ranks
from tests.support import even_digits, fit, moments, same, tiny_module, weights

SCORES = [0.156, 0.417, 0.0, 0.0]


class Scored(PPOModule):
    """Has a given evaluation score after each iteration, and records when it evaluates."""

    def __init__(self, *args: Any, **blocks: Any) -> None:
        super().__init__(*args, **blocks)
        self.evaluated: list[int] = []

    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        self.evaluated.append(self.control.iteration)
        if self.control.iteration:
            value = torch.tensor([SCORES[(self.control.iteration - 1) % 4]])
            self._evaluation._numbers["eval/reward_mean"].append(value)


class Steps(DummyLogger):
    """Records the step of every logged metric."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int | None]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name in metrics:
            self.seen.setdefault(name, []).append(step)


def run(
    folder: Path,
    *callbacks: Callback,
    iterations: int = 4,
    evaluate_every: int = 1,
    save_every: int = 1,
    keep: int | None = 1,
    monitor: str | None = "eval/reward_mean",
    resume: Path | None = None,
    **options: Any,
) -> tuple[Scored, IterationCheckpoint, Any]:
    module = tiny_module(cls=Scored, iterations=iterations)
    checkpoint = IterationCheckpoint(folder, save_every, keep, monitor)
    trainer = fit(
        module,
        [*callbacks, RNGState(), checkpoint],
        folder=folder,
        resume=resume,
        enable_checkpointing=True,
        limit_val_batches=1.0,
        val_check_interval=evaluate_every,
        check_val_every_n_epoch=None,
        **options,
    )
    assert isinstance(module, Scored)
    return module, checkpoint, trainer


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem[-6:]) for path in folder.glob("*.ckpt"))


# --- order -----------------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_holds_the_weights_that_were_evaluated(tmp_path: Path, recwarn: Any) -> None:
    """Evaluations 0.156, 0.417, 0, 0 with keep=1: iteration 2 is best and stays, beside the newest."""
    _, checkpoint, _ = run(tmp_path)
    assert kept(tmp_path) == [2, 4]
    assert checkpoint.best_model_path == str(tmp_path / "iteration_000002.ckpt")
    assert checkpoint.best_model_score == pytest.approx(0.417)
    assert not [w for w in recwarn if "is not logged" in str(w.message)]


def test_a_value_of_an_earlier_iteration_does_not_count(tmp_path: Path) -> None:
    """Evaluated after 2 and 4 only: iteration 3 has no value, although the last one is still among the metrics."""
    module, checkpoint, trainer = run(tmp_path, evaluate_every=2, keep=None)
    assert module.evaluated == [2, 4]
    assert checkpoint.best_model_path.endswith("iteration_000002.ckpt")
    saved = torch.load(tmp_path / "iteration_000001.ckpt", weights_only=True)
    assert saved["best_checkpoints"]["max eval/reward_mean"] == {"score": None, "path": ""}
    assert "eval/reward_mean" in trainer.callback_metrics


def test_an_evaluation_between_two_checkpoints_is_saved_if_it_is_the_best(tmp_path: Path) -> None:
    _, checkpoint, _ = run(tmp_path, iterations=5, evaluate_every=2, save_every=10)
    assert checkpoint.best_model_path.endswith("iteration_000002.ckpt")
    assert kept(tmp_path) == [2, 5], "the last one was not evaluated"


def test_a_metric_of_training_is_the_iterations_own(tmp_path: Path) -> None:
    _, checkpoint, _ = run(tmp_path, monitor="clock/iteration", evaluate_every=2)
    assert kept(tmp_path) == [4] and checkpoint.best_model_score == 4.0
    with pytest.warns(UserWarning, match="'eval/reward_men' is not logged; did you mean eval/reward_mean"):
        run(tmp_path / "misspelt", monitor="eval/reward_men", iterations=1)


@pytest.mark.parametrize(
    ("monitor", "meant"),
    [
        ("eval/reward_men", "eval/reward_mean"),
        ("evla/reward_mean", "eval/reward_mean"),
        ("eval/scroe", "eval/score"),
        ("reward/maen", "reward/mean"),
        *((name, "") for name in ("eval/score", "eval/mine", "reward/mean", "lr/actor", "my/reward_mean", None)),
    ],
)
def test_a_misspelt_monitor_is_named_before_anything_is_trained(tmp_path: Path, monitor: str, meant: str) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        callback = IterationCheckpoint(tmp_path, monitor=monitor)
        trainer: Any = SimpleNamespace(strategy=None)
        for stage in ("validate", "test"):  # the evaluation before training, and another set-up
            callback.setup(trainer, tiny_module(), stage)
    said = [str(warning.message) for warning in heard if "callbacks.checkpoint.monitor" in str(warning.message)]
    assert len(said) == bool(meant)
    assert all(f"{monitor!r} is no metric of the kit; did you mean {meant}?" in text for text in said)


@pytest.mark.parametrize(("evaluate_every", "cut"), [(1, 2), (2, 2), (2, 3), (3, 3), (3, 4)])
def test_a_resumed_run_neither_repeats_nor_loses_an_evaluation(
    tmp_path: Path, whole: dict[int, Any], evaluate_every: int, cut: int
) -> None:
    folder, module = whole[evaluate_every]
    resumed, _, _ = run(
        tmp_path, iterations=5, evaluate_every=evaluate_every, resume=folder / f"iteration_{cut:06d}.ckpt"
    )
    assert resumed.evaluated == [n for n in module.evaluated if n > cut]
    assert same(weights(resumed), weights(module)) and same(moments(resumed), moments(module))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Uninterrupted runs of five iterations by the interval of their evaluations, with all their checkpoints."""
    runs = {}
    for every in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"every_{every}")
        module, _, _ = run(folder, iterations=5, evaluate_every=every, keep=None)
        assert module.evaluated == [n for n in range(1, 6) if n % every == 0]
        assert kept(folder) == [1, 2, 3, 4, 5]
        runs[every] = folder, module
    return runs


def test_a_stop_is_evaluated_before_it_is_saved(tmp_path: Path) -> None:
    class Enough(RLHFCallback):
        def on_update_end(self, trainer: Any, module: ActorCriticModule, stats: Any) -> None:
            if stats.iteration == 2:
                module.control.stop_training("enough")

    module, checkpoint, _ = run(tmp_path, Enough(), evaluate_every=3, save_every=10)
    assert module.evaluated == [2] and kept(tmp_path) == [2]
    assert checkpoint.best_model_score == pytest.approx(0.417)
    resumed, _, _ = run(tmp_path, evaluate_every=3, resume=tmp_path / "iteration_000002.ckpt")
    assert resumed.evaluated == [3]


def test_one_callback_serves_one_fit_after_another(tmp_path: Path) -> None:
    """The same module continues the count; another one starts at 0, and the first one's checkpoints are set aside."""
    module, callback = tiny_module(iterations=2), IterationCheckpoint(tmp_path, 1, keep=None)
    fit(module, [callback], folder=tmp_path, enable_checkpointing=True)
    fit(module, [callback], folder=tmp_path, enable_checkpointing=True)
    assert kept(tmp_path) == [1, 2, 3, 4] and module.control.iteration == callback.iteration == 4
    fit(tiny_module(iterations=1), [callback], folder=tmp_path, enable_checkpointing=True)
    assert kept(tmp_path) == [1] and len(list(tmp_path.glob("*.set_aside"))) == 4


def test_the_best_checkpoint_is_kept_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    run(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    _, checkpoint, _ = run(tmp_path / "b", iterations=5, resume=tmp_path / "b" / "iteration_000004.ckpt")
    assert kept(tmp_path / "b") == [2, 5]
    assert checkpoint.best_model_path == str(tmp_path / "b" / "iteration_000002.ckpt")


class Mine(Callback):
    """Logs as a Lightning callback does."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.log("mine", 1.0)


def test_everything_is_logged_under_its_iteration(tmp_path: Path) -> None:
    """Evaluations after 2 and 4 were recorded at 1 and 3."""
    steps = Steps()
    options = {"logger": steps, "log_every_n_steps": 1, "evaluate_every": 2}
    module, _, trainer = run(tmp_path, Mine(), **options)
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    assert steps.seen["eval/reward_mean"] == [2, 4, 4]
    assert steps.seen["reward/mean"] == steps.seen["mine"] == [1, 2, 3, 4]
    resumed = Steps()
    run(tmp_path / "resumed", Mine(), resume=tmp_path / "iteration_000002.ckpt", **options | {"logger": resumed})
    assert resumed.seen["eval/reward_mean"] == [4] and resumed.seen["mine"] == [3, 4]


# --- errors ----------------------------------------------------------------------------------------------------------


class Breaks(RLHFCallback):
    """An error in one event of one iteration."""

    def __init__(self, event: str, iteration: int) -> None:
        self.event, self.iteration = event, iteration

    def on_rollout_end(self, trainer: Any, module: ActorCriticModule, rollout: Any) -> None:
        self._perhaps("rollout", module)

    def on_experience_scored(self, trainer: Any, module: ActorCriticModule, experience: Any) -> None:
        self._perhaps("score", module)

    def on_experience_ready(self, trainer: Any, module: ActorCriticModule, experience: Any, stats: Any) -> None:
        self._perhaps("advantages", module)

    def on_minibatch_end(self, trainer: Any, module: ActorCriticModule, stats: Any) -> None:
        self._perhaps("update", module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._perhaps("evaluation", module)

    def _perhaps(self, event: str, module: ActorCriticModule) -> None:
        if (event, module.control.iteration) == (self.event, self.iteration):
            torch.rand(3)  # random numbers drawn since the last iteration must not show
            raise ZeroDivisionError("broken")


class Counted:
    """A reward that fails at its n-th call."""

    def __init__(self, fails: int) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, batch: RewardBatch) -> list[float]:
        self.calls += 1
        if self.calls == self.fails:
            raise ZeroDivisionError("broken")
        return even_digits(batch)


def five(
    folder: Path, *callbacks: Callback, reward: Any = even_digits, resume: Path | None = None, **options: Any
) -> Any:
    module = tiny_module(
        iterations=5, reward=reward, reward_processing={"normalise": "running"}, optimizer={"schedule": "cosine"}
    )
    own = [AdaptiveKL(target=0.01, horizon=100), GradientMonitor(), RNGState(), IterationCheckpoint(folder, 10)]
    fit(module, [*callbacks, *own], folder=folder, resume=resume, enable_checkpointing=True, **options)
    return module


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> ActorCriticModule:
    return five(tmp_path_factory.mktemp("uncut"))


@pytest.mark.parametrize("place", ["rollout", "reward", "score", "advantages", "evaluation"])
def test_an_error_before_the_update_leaves_the_iteration_before(
    tmp_path: Path, uncut: ActorCriticModule, place: str
) -> None:
    """The weights have not changed yet: the end of iteration 3 is saved, and a run resumed from it is bit-equal."""
    evaluation = {"limit_val_batches": 1.0, "val_check_interval": 3, "check_val_every_n_epoch": None}
    options = evaluation if place == "evaluation" else {}
    reward = Counted(4) if place == "reward" else even_digits
    iteration = 3 if place == "evaluation" else 4
    error = RewardError if place == "reward" else ZeroDivisionError
    with pytest.raises(error, match="broken"):
        five(tmp_path, Breaks(place, iteration), reward=reward, **options)
    assert kept(tmp_path) == [1, 3]
    resumed = five(tmp_path, resume=tmp_path / "iteration_000003.ckpt", **options)
    assert same(weights(resumed), weights(uncut)) and same(moments(resumed), moments(uncut))
    assert resumed.control.state_dict() == uncut.control.state_dict()
    assert torch.equal(resumed.reward_moments.mean, uncut.reward_moments.mean)


def test_an_error_in_the_update_leaves_what_was_saved(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        five(tmp_path, Breaks("update", 4))
    assert kept(tmp_path) == [1]


def break_on_two(rank: int, folder: Path) -> str:
    """The reward of the second rank fails in iteration 3."""
    module = tiny_module(iterations=5, reward=Counted(3 if rank == 1 else 0))
    callbacks = [RNGState(), IterationCheckpoint(folder, 10)]
    options = {"strategy": "ddp", "devices": 2, "enable_checkpointing": True}
    try:
        fit(module, callbacks, folder=folder, **options)
    except RewardError as error:
        return str(error)
    return "no error"


def test_an_error_of_one_rank_leaves_the_iteration_before(tmp_path: Path) -> None:
    found = run_ranks(break_on_two, tmp_path / "run", folder=tmp_path, process_group=False)
    assert all("ZeroDivisionError: broken" in text for text in found), "both ranks end, and neither waits"
    assert kept(tmp_path / "run") == [1, 2]


# --- failures --------------------------------------------------------------------------------------------------------


class Poison(RLHFCallback):
    """Puts NaN into a weight after the update of iteration 3."""

    def on_update_end(self, trainer: Any, module: ActorCriticModule, stats: Any) -> None:
        if stats.iteration == 3:
            with torch.no_grad():
                next(module.actor.parameters())[0] = torch.nan


class Overflows(PPOModule):
    """Every loss from iteration 2 on is NaN."""

    def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
        return super().micro_batch_loss(micro, metrics) * (torch.nan if self.control.iteration >= 2 else 1.0)


def test_gradients_that_stay_broken_are_a_failure_and_no_checkpoint(tmp_path: Path) -> None:
    module = tiny_module(cls=Overflows, iterations=4)
    with pytest.raises(TrainingFailed, match="iteration 2: loss or gradient not finite in 3 steps in a row"):
        fit(
            module,
            [GradientMonitor(max_nonfinite=3), IterationCheckpoint(tmp_path, 2)],
            folder=tmp_path,
            enable_checkpointing=True,
        )
    assert kept(tmp_path) == [1]


def test_weights_that_are_not_finite_become_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the weights after iteration 3 are not finite"):
        run(tmp_path, Poison(), evaluate_every=9)
    assert latest_valid(tmp_path) == tmp_path / "iteration_000002.ckpt"
