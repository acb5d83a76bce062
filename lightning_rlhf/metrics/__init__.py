"""Metrics: what they are called, how they are collected and reduced, and statistics that live across iterations."""

from lightning_rlhf.metrics.names import Metric, register

__all__ = ["Metric", "register"]
