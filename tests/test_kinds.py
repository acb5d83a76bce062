"""Which values fit which annotation, and what is allowed instead."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.kinds import wrong_kind

FITS: list[tuple[Any, str | None]] = [
    (1, "int"),
    (1, "float"),
    (1.5, "float | None"),
    (None, "float | None"),
    (True, "bool"),
    ("a", "str | Path"),
    (3, "str"),
    (["a"], "str | Sequence[str]"),
    ({"a": None}, "Mapping[str, float | None] | None"),
    ({"_target_": "my.number"}, "float"),
    (object(), "Callable[[int], str] | None"),
    (object(), ""),
    (object(), None),
]
WRONG: list[tuple[Any, str, str]] = [
    (1.5, "int", "a whole number"),
    (True, "int", "a whole number"),
    (float("inf"), "float | None", "a finite number, or null"),
    (1, "bool", "true or false"),
    (None, "str | Path", "a text"),
    ([], "str | Path | None", "a text, or null"),
    ({}, "str | Sequence[str]", "a text or a list"),
    (3, "Mapping[str, float | None] | None", "a block {name: value}, or null"),
    ("a", "dict[str, list[int]]", "a block {name: value}"),
    ("a", "list[dict[str, int]]", "a list"),
]


@pytest.mark.parametrize(("value", "annotation"), FITS)
def test_a_value_that_fits(value: Any, annotation: str | None) -> None:
    assert wrong_kind(value, annotation) is None


@pytest.mark.parametrize(("value", "annotation", "allowed"), WRONG)
def test_a_value_that_does_not_fit(value: Any, annotation: str, allowed: str) -> None:
    assert wrong_kind(value, annotation) == allowed
