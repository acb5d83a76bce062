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
from lightning_rlhf.reporting.mlflow_delivery import RunRecord
from lightning_rlhf.reporting.mlflow_logger import RLMLFlowLogger, send_spooled

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
