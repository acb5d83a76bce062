"""The work of each rank for test_uneven.py: each has something that the other has not."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning import LightningDataModule, Trainer

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.loaders import ValidationLoader
from lightning_rlhf.distributed.strategies import DDPStrategy, FSDP2Strategy
from lightning_rlhf.rewards import RewardBatch, RewardError
from tests.support import even_digits, prompts, tiny_module

STRATEGIES = {"ddp": DDPStrategy, "fsdp2": FSDP2Strategy}
SECONDS = 60
"""After which a rank that waits for the other gives up."""


def trainer(strategy: str, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0} | options
    return Trainer(
        accelerator="cpu", strategy=STRATEGIES[strategy](timeout_seconds=SECONDS), devices=2,
        use_distributed_sampler=False, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip


def evaluated(trainer_: Trainer, module: Any, held_out: int, batch: int, data: Any = None) -> dict[str, float]:
    """Metrics of an evaluation of so many prompts."""
    rows = [{"prompt": f"{i}+{i}="} for i in range(held_out)]
    own = PromptDataModule(
        [{"prompt": "9+9="}],
        rows,
        tokenizer=module.tokenizer,
        prompts_per_iteration=2,
        iterations=1,
        validation_batch_size=batch,
    )
    [numbers] = trainer_.validate(module, datamodule=data or own, verbose=False)
    return {name: float(value) for name, value in numbers.items()}


class Lopsided(LightningDataModule):
    """Validation loaders of one's own: one batch on the first rank, three on the second."""

    def __init__(self, data: PromptDataModule) -> None:
        super().__init__()
        self.data = data

    def val_dataloader(self) -> Any:
        parts = ([0], [1, 2, 3])[torch.distributed.get_rank()]
        return ValidationLoader([self.data.validation_prompts[i] for i in parts], 1)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def evaluations(rank: int, strategy: str, counts: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Several evaluations in a row; the last one with loaders of different lengths."""
    module = tiny_module()
    found = [evaluated(trainer(strategy, limit_val_batches=None), module, *count) for count in counts]
    rows = [{"prompt": f"{i}+{i}="} for i in range(4)]
    data = PromptDataModule(rows[:1], rows, tokenizer=module.tokenizer, prompts_per_iteration=2, iterations=1)
    return [*found, evaluated(trainer(strategy, limit_val_batches=None), module, 4, 1, Lopsided(data))]


def failing_on_two_digits(batch: RewardBatch) -> list[float]:
    """A reward that fails at one prompt, which rank 0 has."""
    if "2+2=" in batch.prompts:
        raise ZeroDivisionError("no reward for 2+2=")
    return even_digits(batch)


def failing_evaluation(rank: int, strategy: str) -> str:
    module = tiny_module(reward=failing_on_two_digits)
    try:
        evaluated(trainer(strategy, limit_val_batches=None), module, 5, 1)
    except RewardError as error:
        return str(error)
    return "no error"


class OnOneRank(RLHFCallback):
    """Sets fields of the experience on rank 1 alone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fraction: float | None = None
        self.advantages: list[float] = []

    def on_experience_scored(self, trainer: Any, module: Any, experience: Any) -> None:
        if torch.distributed.get_rank() == 0:
            return
        override = torch.full_like(experience.rollout_logprobs, math.nan)
        override[0, 0] = -10.0
        if self.kind == "override":
            experience.reward_override = override
        elif self.kind == "shape":
            experience.reward_override = override[:, :1]
        elif self.kind == "term":
            experience.components["mine"] = torch.zeros(len(experience))

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
        self.advantages = experience.advantages.sum(-1).tolist()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.fraction = float(trainer.callback_metrics["reward/overridden_fraction"])


def training(rank: int, kind: str, strategy: str = "ddp") -> Any:
    """One iteration in which the ranks differ; the share of overridden tokens, or the error."""

    def broken(batch: RewardBatch) -> list[float]:
        if kind == "reward" and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("no reward on rank 1")
        return even_digits(batch)

    module, callback = tiny_module(iterations=1, reward=broken), OnOneRank(kind)
    try:
        trainer(strategy, callbacks=[callback]).fit(module, datamodule=prompts(module))
    except (RuntimeError, RewardError) as error:
        return f"{type(error).__name__}: {error}"
    return callback.fraction
