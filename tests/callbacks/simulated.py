"""Behaviour of a callback in a simulated run: given numbers of every size, its decisions, knobs and reports.

The events and ``module.control`` are real, the numbers are random with a fixed seed; no model is trained.
"""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from matplotlib.figure import Figure

from lightning_rlhf import memory
from lightning_rlhf.callbacks import CalibrationError, RLHFCallback
from lightning_rlhf.control import Control
from lightning_rlhf.events import EpochStats, EvaluationStats, ExperienceStats, MinibatchStats, UpdateStats
from lightning_rlhf.experience import Finish
from lightning_rlhf.rewards import RewardBatch
from tests.support import experience_stats, minibatch_stats

ITERATIONS = 60


def behaviour(callback: RLHFCallback, experience: Any, folder: Path, monkeypatch: Any) -> list[str]:
    """All visible effects of a callback in a run of :data:`ITERATIONS`, in order.

    Args:
        callback: newly built.
        experience: of a real rollout, for callbacks that look at samples.
        folder: the run's, empty.
        monkeypatch: sets how full the device's memory is; figures are made and become empty files.
    """
    seen: list[str] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).touch())
    away = torch.linspace(-2.0, 2.0, experience.old_logprobs.numel()).reshape(experience.old_logprobs.shape)
    experience.ref_logprobs = experience.old_logprobs + away
    draw = random.Random(7)
    log = SimpleNamespace(log_table=lambda *table: seen.append(str(table)))
    module, trainer = simulated_module(seen, experience), SimpleNamespace(
        default_root_dir=folder, is_global_zero=True, loggers=[log], callbacks=[callback], val_check_interval=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    hooks: Any = callback
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hooks.setup(trainer, module, "fit")
        hooks.on_fit_start(trainer, module)
        hooks.on_train_start(trainer, module)
        for iteration in range(1, ITERATIONS + 1):
            monkeypatch.setattr(memory, "peak_memory_share", lambda device: draw.uniform(0.05, 1.0))
            try:
                simulate(hooks, trainer, module, experience, iteration, draw)
            except CalibrationError as error:
                seen.append(str(error))
            control = module.control
            seen.append(str([(d.verb, d.reason) for d in control.decisions]))
            seen.append(str({name: (knob.value, knob.effective) for name, knob in control.knobs.items()}))
            seen.append(f"{control.reported} {control.training_stopped} {control.wants('stop_epochs')}")
            seen.append(str(control.take_rollback()))
            control._stop_training = None  # goes on, so that a later decision is seen as well
        hooks.on_train_end(trainer, module)
    seen += [str(warning.message) for warning in caught]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return seen + [f"{path.relative_to(folder)}: {path.read_bytes().decode(errors='replace')}" for path in files]


def simulated_module(seen: list[str], experience: Any) -> Any:
    """The parts of a module that callbacks use: control, engine, parameter groups and noise."""
    control = Control()
    control.register("kl_coefficient", 0.1)
    control.register("max_new_tokens", 64, minimum=1, integer=True)
    control.register("micro_batch_tokens", 4096, minimum=1, integer=True)
    control.register("lr_scale", 1.0)
    control.register("ptx_coefficient", 0.05)

    def text_loss(blocks: Any) -> float:
        """Nats per token: up to 1.05, where it stays for a while, then lower; each block adds a little."""
        seen.append(f"loss of {blocks.tolist()}")
        return min(1.0 + 0.01 * control.iteration, 1.05) - 0.04 * (control.iteration > 20) + 1e-4 * len(blocks)

    def probe(prompts: Any, *, max_new_tokens: int) -> Any:
        seen.append(f"probe of {prompts} with {max_new_tokens} tokens")
        return experience, experience.old_logprobs + 0.01 * control.iteration

    return SimpleNamespace(
        safety=None,
        control=control,
        held_out_text=torch.arange(40).reshape(20, 2),
        read_text=lambda source, *, text_field, key: torch.full((20, 2), len(source) + len(text_field)),
        text_loss=text_loss,
        modules=lambda: iter(()),
        train=lambda mode: None,
        reference=object(),
        iterations=ITERATIONS,
        device=torch.device("cpu"),
        engine=SimpleNamespace(
            sampling=SimpleNamespace(max_new_tokens=64, truncated=False, temperature=1.0),
            describe=lambda: {"dtype": "bfloat16"},
        ),
        parameter_groups=lambda: [{"name": "actor", "clip_norm": 1.0}, {"name": "critic", "clip_norm": 1.0}],
        actor=torch.nn.Linear(1, 1),
        trainer=SimpleNamespace(precision="32-true"),
        probe=probe,
        sigma_by_layer=lambda: {0: 0.1, 1: 0.2},
        ratio_tails=[],
    )


class Prompts:
    """32 prompts of an iteration."""

    def __init__(self, count: int = 32) -> None:
        self.count = count
        self.keys: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self.count

    def __str__(self) -> str:
        return f"{self.count} prompts"

    def first(self, count: int) -> Prompts:
        return Prompts(min(count, self.count))


def simulate(callback: Any, trainer: Any, module: Any, experience: Any, iteration: int, draw: random.Random) -> None:
    """The events of one iteration: two epochs of three minibatches unless they are ended, and memory that runs out."""
    control: Control = module.control
    control.begin_iteration(iteration)
    size = 10 ** draw.uniform(-3.5, 1.0)  # of everything that is far off in this iteration
    with control.allow("skip_step", "rollback"):
        callback.on_rollout_start(trainer, module, Prompts())
        if iteration % 9 == 0 and hasattr(callback, "after_rollout_oom"):
            callback.after_rollout_oom(control, 32, "out of memory")
        callback.on_rollout_end(trainer, module, experience)
        experience.reward_override = None
        callback.on_experience_scored(trainer, module, experience)
        samples = simulated_samples(iteration, size, draw)
        callback.on_experience_ready(trainer, module, experience, samples)
        finished = []
        for epoch in range(2):
            if not control.wants("stop_epochs"):
                finished.append(simulated_epoch(callback, trainer, module, iteration, epoch, size, draw))
            if iteration % 8 < 4 and not control.wants("stop_epochs"):
                control.stop_epochs("another callback")
        override = experience.reward_override
        control.report("reward/mean", 0.0 if override is None else float(override.nan_to_num(0.0).sum()))
        if iteration % 7 == 0 and hasattr(callback, "after_update_oom"):
            callback.after_update_oom(control, int(control.value("micro_batch_tokens")), "out of memory")
        last = finished[-1] if finished else None
        update = UpdateStats(
            iteration=iteration,
            epochs_used=len(finished),
            steps=3 * len(finished),
            steps_skipped=0,
            kl_old=last.kl_old if last else math.nan,
            kl_ref=last.kl_ref if last else math.nan,
            clip_fraction=last.clip_fraction if last else math.nan,
        )
        callback.on_update_end(trainer, module, update)
    callback.on_train_batch_end(trainer, module, None, None, 0)
    callback.on_validation_epoch_start(trainer, module)
    callback.on_evaluation_scored(trainer, module, simulated_answers(iteration), experience)
    evaluated = EvaluationStats(iteration, True, reward_mean=0.5, response_length_mean=4.0, truncated_fraction=0.0)
    callback.on_evaluation_end(trainer, module, evaluated)


def simulated_answers(iteration: int) -> RewardBatch:
    """As many answers as the experience has, on average longer than before until half of the run, then shorter."""
    usual = min(iteration, ITERATIONS - iteration)
    lengths = [1 + usual + i * iteration % 7 for i in range(16)]
    answers = ["1" * length for length in lengths]
    return RewardBatch([f"{i}=" for i in range(16)], answers, [[0]] * 16, [{}] * 16, [Finish.NATURAL] * 16)


def simulated_samples(iteration: int, size: float, draw: random.Random) -> ExperienceStats:
    """The score rises for 20 iterations, stays constant with a constant KL for 10, then is slightly, then far lower."""
    lower = 0.0 if iteration <= 30 else 0.08 if iteration <= 45 else 0.9
    still = 20 < iteration <= 30
    return experience_stats(
        iteration=iteration,
        score_mean=min(iteration / 20, 1.0) - lower + draw.uniform(-0.01, 0.01),
        score_std=0.2,
        kl_ref=(0.05 if still else size) * draw.uniform(0.95, 1.0),
        advantage_raw_abs_mean=10 ** draw.uniform(-3.0, 0.0),
        truncated_fraction=draw.uniform(0.0, 0.5),
        response_length_mean=40.0,
    )


def simulated_epoch(
    callback: Any, trainer: Any, module: Any, iteration: int, epoch: int, size: float, draw: random.Random
) -> EpochStats:
    three: list[MinibatchStats] = []
    callback.on_ppo_epoch_start(trainer, module, epoch)
    for minibatch in range(3):
        finite = not 10 <= iteration <= 12
        numbers: dict[str, Any] = {
            **{"iteration": iteration, "epoch": epoch, "minibatch": minibatch, "finite": finite, "stepped": finite},
            **{"kl_old": size * draw.uniform(0.0, 1.0), "kl_ref": size * draw.uniform(0.5, 1.5)},
            **{"clip_fraction": draw.uniform(0.0, 0.9), "ratio_max": 1 + size},
            "grad_norms": {"actor": 10 ** draw.uniform(-3.0, -1.0), "critic": draw.uniform(0.0, 2.0)},
            "clipped": {"actor": False, "critic": draw.random() < 0.8},
        }
        stats = MinibatchStats(**{**vars(minibatch_stats()), **numbers})
        callback.on_before_step(trainer, module, stats)
        callback.on_minibatch_end(trainer, module, stats)
        three.append(stats)
    finished = EpochStats.over(three)
    callback.on_ppo_epoch_end(trainer, module, finished)
    return finished
