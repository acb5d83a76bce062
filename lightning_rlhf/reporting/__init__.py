"""Tracking: the MLflow logger."""

from lightning_rlhf.reporting.mlflow import RLMLFlowLogger, send_spooled
from lightning_rlhf.reporting.mlflow_run import RunRecord

__all__ = ["RLMLFlowLogger", "RunRecord", "send_spooled"]
