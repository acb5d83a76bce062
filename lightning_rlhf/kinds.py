"""Whether a value fits a type annotation of numbers, booleans, texts, lists or blocks; others accept anything."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

ALLOWED = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a text",
    "Path": "a text",
    "Sequence": "a list",
    "list": "a list",
    "Mapping": "a block {name: value}",
    "dict": "a block {name: value}",
}


def wrong_kind(value: Any, annotation: str | None) -> str | None:
    """What is allowed, if ``value`` does not fit; ``None`` if it fits or the annotation is not a simple one.

    What lists and blocks hold is not looked at.

    Args:
        value: from a configuration.
        annotation: as written in the source, such as ``float | None`` or ``Mapping[str, float] | None``.
    """
    kinds = _kinds(annotation or "")
    if not kinds or not kinds <= {*ALLOWED, "None"}:
        return None
    if isinstance(value, dict) and "_target_" in value:
        return None  # whatever this builds
    if _fits(value, kinds):
        return None
    names = dict.fromkeys(text for kind, text in ALLOWED.items() if kind in kinds)
    return " or ".join(names) + (", or null" if "None" in kinds else "")


def scalar_text(value: Any) -> str | None:
    """A text, number or boolean as text, as YAML writes it; ``None`` for anything else, for NaN and infinity.

    Whole numbers are written without a point: a column of whole numbers with a gap is read as floating-point numbers.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real) and math.isfinite(value):
        return str(int(float(value))) if float(value).is_integer() else repr(float(value))
    return None


def _kinds(annotation: str) -> set[str]:
    """The types of a union, without what is in their brackets."""
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", annotation)) != annotation:
        annotation = shorter
    return {part.strip() for part in annotation.split("|")} - {""}


def _fits(value: Any, kinds: set[str]) -> bool:
    if value is None:
        return "None" in kinds
    if isinstance(value, dict):
        return bool({"Mapping", "dict"} & kinds)
    if isinstance(value, (list, tuple)):
        return bool({"Sequence", "list"} & kinds)
    if {"str", "Path"} & kinds:
        return True  # a number that is written as a text
    if isinstance(value, bool):
        return "bool" in kinds
    whole = isinstance(value, int) and bool({"int", "float"} & kinds)
    return whole or (isinstance(value, float) and "float" in kinds and math.isfinite(value))
