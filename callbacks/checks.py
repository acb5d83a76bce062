"""Callbacks refuse invalid settings when they are built."""

from __future__ import annotations

from typing import Any

from lightning_rlhf import bounds
from lightning_rlhf.errors import SettingError


def bounded(callback: str, **bounds_and_settings: Any) -> None:
    """:func:`lightning_rlhf.bounds.bounded` for the block ``callbacks.<callback>`` of the configuration."""
    bounds.bounded(f"callbacks.{callback}", **bounds_and_settings)


def check_range(callback: str, minimum: float, maximum: float) -> None:
    """Refuse bounds of a coefficient that are not positive, or the lower one not below the upper one."""
    bounded(callback, above=0, minimum=minimum, maximum=maximum)
    if minimum >= maximum:
        allowed = f"it must be below callbacks.{callback}.maximum = {maximum}"
        raise SettingError(f"callbacks.{callback}.minimum", minimum, allowed)
