"""Metrics: their names, collection and reduction, and statistics over several iterations."""

from lightning_rlhf.metrics.names import Metric, register

__all__ = ["Metric", "register"]
