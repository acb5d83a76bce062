"""Which values fit which annotation, and what is allowed instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf.bounds import LARGEST, bounded, is_number
from lightning_rlhf.errors import SettingError
from lightning_rlhf.kinds import blank, wrong_kind
from lightning_rlhf.mixins.alp_settings import ALPSettings
from lightning_rlhf.mixins.ptx_settings import PTXSettings
from lightning_rlhf.rewards.safety import ClassifierSettings, SafetySettings
from lightning_rlhf.schema.keys import NAMES, kinds
from lightning_rlhf.schema.signatures import declared
from lightning_rlhf.settings import NOT_BLANK, build

CONF = Path(__file__).resolve().parents[1] / "conf"

FITS: list[tuple[Any, str | None]] = [
    (1, "int"),
    (1, "float"),
    (1.5, "float | None"),
    (None, "float | None"),
    (True, "bool"),
    ("a", "str | Path"),
    ("3", "str"),
    ("min", "Literal['min', 'max']"),
    (None, "Literal['min', 'max'] | None"),
    (["a"], "tuple[str, ...]"),
    (Path("a"), "str | Path"),
    (2**63 - 1, "int"),
    (-3.4e38, "float"),
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
    (3, "str", "a text; 3 is a number, the text has quotes: '3'"),
    (True, "str | Path | None", "a text, or null; true is no text, the text has quotes: 'true'"),
    ([13, "a"], "tuple[str, ...]", "a list of texts; 13 is none, texts have quotes: ['13', 'a']"),
    ([None], "str | Sequence[str]", "a list of texts"),
    (2**63, "int | None", "a whole number, or null (whole numbers are below 2**63)"),
    (-(10**400), "float", "a finite number (whole numbers are below 2**63)"),
    (3.5e38, "float", "a finite number (float32 ends at 3.4e+38)"),
    (None, "Literal['min', 'max']", "one of min, max"),
    (["min"], "Literal['min', 'max'] | None", "one of min, max, or null"),
    ("mim", "Literal['min', 'max']", "one of min, max (did you mean 'min'?)"),
]


@pytest.mark.parametrize(("value", "annotation"), FITS)
def test_a_value_that_fits(value: Any, annotation: str | None) -> None:
    assert wrong_kind(value, annotation) is None


@pytest.mark.parametrize(("value", "annotation", "allowed"), WRONG)
def test_a_value_that_does_not_fit(value: Any, annotation: str, allowed: str) -> None:
    assert wrong_kind(value, annotation) == allowed


def texts() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every block with a ``_target_`` in the shipped files, and its arguments that are texts."""
    for path in sorted(CONF.glob("*/*.yaml")):
        for key, block in _blocks(yaml.safe_load(path.read_text(encoding="utf-8")) or {}):
            found = declared(block["_target_"])
            for name in found.annotations if found else ():
                annotation = found.annotations[name]
                if name in block and "torch" not in annotation and {"str", "Path"} & {*annotation.split(" | ")}:
                    yield f"{path.parent.name}/{path.stem}:{key}", block, name


def _blocks(node: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, value in node.items():
            yield from _blocks(value, f"{key}.{name}".lstrip("."))


TEXTS = list(texts())
FOLDERS = {"dirpath", "run_dir", "save_dir", "store_dir", "cache_dir", "resume_from", "branch_from"}
"""Texts that are paths by their annotation."""


def test_the_shipped_texts_are_found() -> None:
    found = {name for _, _, name in TEXTS}
    assert {"path", "dirpath", "monitor", "blacklist", "experiment_name", "tracking_uri", "store_dir"} <= found
    assert len(TEXTS) > 50


@pytest.mark.parametrize(("block", "name"), [t[1:] for t in TEXTS], ids=[f"{t[0]}.{t[2]}" for t in TEXTS])
def test_a_number_is_refused_in_place_of_every_shipped_text(block: dict[str, Any], name: str) -> None:
    found = {problem.key: problem for problem in kinds({"some": {"_target_": block["_target_"], name: 5}})}
    if name == "version":  # of a CSV log, which may be a number
        assert not found
        return
    assert list(found) == [f"some.{name}"]
    assert "5 is a number, the text has quotes: '5'" in found[f"some.{name}"].allowed
    for empty in ("", "  "):
        said = [problem.allowed for problem in kinds({"some": {"_target_": block["_target_"], name: empty}})]
        assert [text.startswith("a text that is not blank") for text in said] == [True] * (name in NAMES | FOLDERS)


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        (PTXSettings, {"source": "a.txt"}, "text_field"),
        (ALPSettings, {}, "layers"),
        (ClassifierSettings, {"path": "a"}, "path"),
        (ClassifierSettings, {"path": "a"}, "revision"),
        (SafetySettings, {"words": ["a"], "action": "replace"}, "reply"),
    ],
)
def test_a_number_or_a_blank_in_place_of_a_name_in_a_block_of_settings(
    kind: type[Any], values: dict[str, Any], name: str
) -> None:
    with pytest.raises(SettingError, match="5 is a number, the text has quotes: '5'"):
        build(kind, "block", {**values, name: 5})
    assert name in NOT_BLANK
    with pytest.raises(SettingError) as caught:
        build(kind, "block", {**values, name: "  "})
    assert (caught.value.key, caught.value.allowed) == (f"block.{name}", "a text that is not blank")


def test_a_label_may_be_a_number() -> None:
    assert build(ClassifierSettings, "block", {"path": "a", "label": 1}).label == 1


@pytest.mark.parametrize(("words", "said"), [
    (["  "], "not blank"),
    ([13, 7], "a list of texts, none of them empty; 13 is none, texts have quotes: ['13', '7']"),
])  # fmt: skip
def test_words_that_are_none(words: list[Any], said: str) -> None:
    with pytest.raises(SettingError) as caught:
        build(SafetySettings, "module.safety", {"words": words})
    assert caught.value.key == "module.safety.words" and said in caught.value.allowed


def test_blank() -> None:
    assert blank("") and blank(" \n") and blank(["a", " "])
    assert not blank("a") and not blank(None) and not blank(0) and not blank([])


@pytest.mark.parametrize("value", [1e39, -1e308, 10**400, 2**63, float("inf"), float("nan"), True, "1"])
def test_no_number(value: Any) -> None:
    assert not is_number(value)
    with pytest.raises(SettingError, match=r"block\.rate = .* a finite number >= -5"):
        bounded("block", at_least=-5, rate=value)
    with pytest.raises(SettingError, match=r"block\.count = .* a whole number"):
        bounded("block", whole=True, count=value)


def test_the_largest_numbers() -> None:
    assert is_number(LARGEST) and is_number(-LARGEST) and is_number(2**63 - 1)
    with pytest.raises(SettingError, match=r"float32 ends at 3\.4e\+38"):
        bounded("block", rate=1e39)
    with pytest.raises(SettingError, match=r"below 2\*\*63"):
        bounded("block", whole=True, count=2**63)
