"""Tracking: the MLflow logger, and any other of Lightning's beside it."""

from lightning_rlhf.reporting.loggers import (
    RunCSVLogger,
    RunTensorBoardLogger,
    RunWandbLogger,
    blocks_of,
    log_config,
    tell,
    tracked,
)
from lightning_rlhf.reporting.mlflow import RLMLFlowLogger, send_spooled
from lightning_rlhf.reporting.mlflow_run import RunRecord

__all__ = [
    "RLMLFlowLogger",
    "RunCSVLogger",
    "RunRecord",
    "RunTensorBoardLogger",
    "RunWandbLogger",
    "blocks_of",
    "log_config",
    "send_spooled",
    "tell",
    "tracked",
]
