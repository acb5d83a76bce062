"""Callbacks refuse invalid settings when they are built."""

from __future__ import annotations

from typing import Any

from lightning_rlhf import bounds


def bounded(callback: str, **bounds_and_settings: Any) -> None:
    """:func:`lightning_rlhf.bounds.bounded` for the block ``callbacks.<callback>`` of the configuration."""
    bounds.bounded(f"callbacks.{callback}", **bounds_and_settings)
