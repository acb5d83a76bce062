"""Trainings one after the other in one group: ``torchrun ... -m tests.distributed.fsdp2_runs RUNS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.checkpoint_files import with_items
from lightning_rlhf.lora import whole
from lightning_rlhf.train import train


class Look(Callback):
    """Writes what a run begins with: every weight and the optimiser's state, whole."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = {
            "state_dict": dict(pl_module.state_dict()),
            "optimizer_states": [pl_module.optimizers().optimizer.state_dict()],
        }
        state = _whole(state)
        if trainer.is_global_zero:
            torch.save(state, self.path)


def _whole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return whole(value).clone()
    if isinstance(value, dict):
        return with_items(value, ((key, _whole(item)) for key, item in value.items()))
    return [_whole(item) for item in value] if isinstance(value, list) else value


def run(overrides: list[str]) -> dict[str, float]:
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = hydra.compose("train", overrides=overrides)
    return train(config)


def main() -> None:
    for overrides in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(overrides)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
