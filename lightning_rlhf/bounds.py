"""The bounds check of all numeric settings."""

from __future__ import annotations

import math
from typing import Any

from lightning_rlhf.errors import SettingError

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32, about 3.4e38."""
WHOLE = 2**63
"""Whole numbers are smaller in size."""


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number, of float32 or of 64 bits as a whole one; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= LARGEST if isinstance(value, float) else abs(value) < WHOLE


def too_large(value: object) -> str:
    """What to add to what is allowed, for a finite number that float32 or 64 bits cannot hold; nothing for others."""
    if is_number(value) or isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if isinstance(value, int):
        return " (whole numbers are below 2**63)"
    return f" (float32 ends at {LARGEST:.2g})" if math.isfinite(value) else ""


def bounded(
    block: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
    optional: bool = False,
    **settings: Any,
) -> None:
    """Refuse settings that are not finite numbers of float32 within the bounds; booleans are not numbers.

    Args:
        block: dotted key of the block in the configuration, such as ``callbacks.kl_guard``; empty at the top.
        above, at_least, below, at_most: the bounds; ``None`` is no bound.
        whole: whole numbers only.
        optional: ``None`` is allowed.
        settings: values by name.

    Raises:
        SettingError: names key, value and what is allowed.
    """
    limits = [
        (f"> {above}", lambda x: above is None or x > above),
        (f">= {at_least}", lambda x: at_least is None or x >= at_least),
        (f"< {below}", lambda x: below is None or x < below),
        (f"<= {at_most}", lambda x: at_most is None or x <= at_most),
    ]
    wanted = " and ".join(text for text, _ in limits if not text.endswith("None"))
    allowed = f"a {'whole' if whole else 'finite'} number {wanted}".rstrip() + (", or null" if optional else "")
    for name, value in settings.items():
        if value is None and optional:
            continue
        number = is_number(value) and (isinstance(value, int) or not whole)
        if not (number and all(holds(value) for _, holds in limits)):
            raise SettingError(f"{block}.{name}".lstrip("."), value, f"{allowed}{too_large(value)}")
