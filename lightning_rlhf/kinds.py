"""Whether a value fits an annotation of numbers, booleans, texts, choices, lists or blocks; others accept anything."""

from __future__ import annotations

import ast
import math
import re
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from lightning_rlhf.bounds import is_number, too_large

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
LISTS_OF_TEXTS = {"tuple[str, ...]", "Sequence[str]", "list[str]"}


def wrong_kind(value: Any, annotation: str | None) -> str | None:
    """What is allowed, if ``value`` does not fit; ``None`` if it fits or the annotation is not a simple one.

    What lists and blocks hold is not looked at, except that a list of texts holds texts.

    Args:
        value: from a configuration.
        annotation: as written in the source, such as ``float | None`` or ``Mapping[str, float] | None``.
    """
    annotation, choices = _without_choices(annotation or "")
    kinds = _kinds(annotation)
    if isinstance(value, (list, tuple)) and LISTS_OF_TEXTS & {part.strip() for part in annotation.split("|")}:
        return _no_texts(value)
    if not (kinds or choices) or not kinds <= {*ALLOWED, "None"}:
        return None
    if isinstance(value, dict) and "_target_" in value:
        return None  # whatever this builds
    if _fits(value, kinds) or (isinstance(value, str) and value in choices):
        return None
    names = dict.fromkeys(text for kind, text in ALLOWED.items() if kind in kinds)
    chosen = [f"one of {', '.join(choices)}"] if choices else []
    allowed = " or ".join([*chosen, *names]) + (", or null" if "None" in kinds else "")
    if {"str", "Path"} & kinds:
        return allowed + unquoted(value)
    near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return allowed + (f" (did you mean {near[0]!r}?)" if near else too_large(value))


def unquoted(value: Any) -> str:
    """What to add to what is allowed, for a number or boolean in the place of a text: how the text is written."""
    if not isinstance(value, (int, float)):
        return ""
    shown, kind = (str(value).lower(), "no text") if isinstance(value, bool) else (str(value), "a number")
    return f"; {shown} is {kind}, the text has quotes: '{shown}'"


def blank(value: Any) -> bool:
    """Whether a value is a text without anything but white space, or a list with such a text."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, str) and blank(item) for item in value)
    return isinstance(value, str) and not value.strip()


def _no_texts(values: Any) -> str | None:
    numbers = [value for value in values if isinstance(value, (int, float))]
    if numbers:
        quoted = ", ".join(f"'{str(value).lower() if isinstance(value, bool) else value}'" for value in values)
        return f"a list of texts; {str(numbers[0]).lower()} is none, texts have quotes: [{quoted}]"
    return None if all(isinstance(value, str) for value in values) else "a list of texts"


def _without_choices(annotation: str) -> tuple[str, list[str]]:
    """The annotation without ``Literal[...]`` of texts, and these texts."""
    choices: list[str] = []

    def take(found: re.Match[str]) -> str:
        words = ast.literal_eval(f"[{found[1]}]")
        if not all(isinstance(word, str) for word in words):
            return "object"
        choices.extend(words)
        return ""

    return re.sub(r"\bLiteral\[([^\[\]]*)\]", take, annotation), choices


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
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, (int, float)):
        return is_number(value) and ("float" in kinds or (isinstance(value, int) and "int" in kinds))
    return bool({"str", "Path"} & kinds)
