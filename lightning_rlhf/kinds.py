"""Whether a value fits a type annotation of numbers, whole numbers or booleans; other annotations accept anything."""

from __future__ import annotations

import math
from typing import Any

ALLOWED = {"int": "a whole number", "float": "a finite number", "bool": "true or false"}


def wrong_kind(value: Any, annotation: str | None) -> str | None:
    """What is allowed, if ``value`` does not fit; ``None`` if it fits or the annotation is not a simple one.

    Args:
        value: from a configuration.
        annotation: as written in the source, such as ``float | None``.
    """
    kinds = [part.strip() for part in (annotation or "").split("|")]
    if not set(kinds) <= {*ALLOWED, "str", "None"} or kinds == [""]:
        return None
    optional = "None" in kinds
    names = [ALLOWED[kind] for kind in kinds if kind in ALLOWED]
    if value is None:
        fits = optional
    elif "str" in kinds:
        fits = not isinstance(value, (dict, list))
    elif isinstance(value, bool):
        fits = "bool" in kinds
    else:
        whole = isinstance(value, int) and bool({"int", "float"} & set(kinds))
        fits = whole or (isinstance(value, float) and "float" in kinds and math.isfinite(value))
    if fits:
        return None
    return " or ".join(names or ["a text"]) + (", or null" if optional else "")
