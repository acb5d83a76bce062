"""What the seed of a run gives each process, and the record of it in checkpoints and in MLflow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.experience import sample_seed
from lightning_rlhf.reporting import tell


def seed_of_rank(seed: int, rank: int) -> int:
    """Seed of the global generators of one process (63 bits); that of the run on rank 0, as with one process."""
    return seed if rank == 0 else sample_seed(seed, "rank", rank, 0)


class RankSeeds(Callback):
    """Gives each rank global generators of its own at the start of a training, and records the seeds.

    All ranks build their parts from the run's seed, as they must have the same weights. From then on code that draws
    from a global generator, such as a user's reward, should not draw the same numbers on all. The kit's own draws
    (samples, noise, permutations) depend on no global generator.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seeds = _seeds(trainer, pl_module)
        tell(trainer.loggers, "log_tags", {"seeds/ranks": ", ".join(map(str, seeds["ranks"]))})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            return
        seed = _seeds(trainer, pl_module)["ranks"][trainer.global_rank]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # of all devices

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["seeds"] = _seeds(trainer, pl_module)


def _seeds(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    seed = int(module.seed)  # type: ignore[arg-type]
    return {"run": seed, "ranks": [seed_of_rank(seed, rank) for rank in range(trainer.world_size)]}
