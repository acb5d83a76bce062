"""The configuration of callbacks: every key acts, groups hold what they say, each file works alone and with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf import callbacks, schema
from lightning_rlhf.assembly import make, make_trainer
from lightning_rlhf.callbacks import CalibrationError, RLHFCallback
from tests.support import fit, tiny_module

CONF = Path(__file__).resolve().parents[2] / "conf" / "callbacks"

CHANGES: dict[str, dict[str, Any]] = {
    "adaptive_kl": {
        **{"target": 0.1, "mode": "doubling", "kp": 0.1, "ki": 0.1, "kd": 0.1, "smoothing": 0.5, "minimum": 0.02},
        **{"maximum": 0.4, "horizon": 100, "figure_every": None},
    },
    "advantage_vanish": {"threshold": 0.1, "relative": False},
    "alp_figures": {"every_n_iterations": 3},
    "clip_fraction_break": {"limit": 0.1, "per_minibatch": True},
    "efficiency_stop": {"window": 3, "min_improvement": 0.1, "kl_tolerance": 0.1, "relative": False},
    "kl_guard": {
        **{"target": 0.2, "soft": 1.0, "hard": 2.0, "factor": 3.0, "max_multiplier": 2.0, "restore": False},
        **{"fall": 0.5, "jump": None, "token_limit": 0.5, "token_penalty": -1.0, "iterations": 5},
    },
    "length_curriculum": {"start": 4, "iterations": 3, "max_truncated": None},
    "lr_backoff": {"patience": 1, "factor": 0.9, "recovery": 1.0, "minimum": 0.5},
    "oom_guard": {"retry_after": 1, "high": 0.9, "low": 0.1, "length_step": 0.5, "min_new_tokens": 2},
    "template": {"score": 0.5, "patience": 1},
}
"""Another value for every key of the files that the default run does not load; ``test_keys.py`` has the others."""

GROUPS = {
    "none": set(),
    "minimal": {"kl_early_stop", "gradient_monitor", "checkpoint"},
    "default": {"kl_early_stop", "gradient_monitor", "checkpoint", "samples_table", "calibrate"},
}
GROUPS["stability"] = GROUPS["default"] | {
    *("kl_guard", "clip_fraction_break", "advantage_vanish", "lr_backoff", "oom_guard"),
}
GROUPS["fixed_kl"] = GROUPS["stability"] | {"adaptive_kl"}
GROUPS["paranoid"] = GROUPS["stability"] | {"length_curriculum", "efficiency_stop"}
"""The blocks of each group of callbacks."""


def block(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))[name]


def test_every_file_is_in_a_table() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(CHANGES) | GROUPS["default"] | set(GROUPS)


def test_every_callback_has_a_file() -> None:
    shipped = {getattr(callbacks, name) for name in callbacks.__all__} - {RLHFCallback, CalibrationError}
    built = {type(make(block(name))) for name in CHANGES} | {
        type(make(block(n))) for n in GROUPS["default"] - {"checkpoint"}
    }
    assert shipped <= built


@pytest.mark.parametrize("name", CHANGES)
def test_every_key_changes_what_is_built(name: str) -> None:
    keys = {key for key in block(name) if key != "_target_"}
    assert keys == set(CHANGES[name])
    for key, value in CHANGES[name].items():
        before, after = make(block(name)), make({**block(name), key: value})
        assert json.dumps(vars(before), default=repr) != json.dumps(vars(after), default=repr), key


@pytest.mark.parametrize("name", CHANGES)
def test_the_files_values_are_the_classes_own(name: str) -> None:
    """Alone, in Python or by a file, a callback is the same."""
    plain = type(make(block(name)))()
    assert json.dumps(vars(plain), default=repr) == json.dumps(vars(make(block(name))), default=repr)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_hold_what_they_say(compose: Any, group: str) -> None:
    config = schema.check(compose(f"callbacks={group}", "logger=none"))
    assert set(config["callbacks"] or {}) == GROUPS[group]
    built: list[Any] = make_trainer(config).callbacks  # type: ignore[attr-defined]
    names = [type(callback).__name__ for callback in built]
    if "LRBackoff" in names:
        assert names.index("LRBackoff") > max(names.index(n) for n in ("KLEarlyStop", "KLGuard", "ClipFractionBreak"))


@pytest.mark.parametrize("name", CHANGES)
def test_each_alone_and_beside_a_group(compose: Any, name: str) -> None:
    assert set(schema.check(compose(f"callbacks={name}"))["callbacks"]) == {name}
    both = schema.check(compose(f"callbacks=[minimal,{name}]"))["callbacks"]
    assert set(both) == GROUPS["minimal"] | {name}


@pytest.mark.parametrize("reverse", [False, True])
def test_all_of_them_in_one_run_in_any_order(tmp_path: Path, reverse: bool) -> None:
    every = [make(block(name)) for name in CHANGES if name != "length_curriculum"]
    every += [make({**block("length_curriculum"), "start": 2})]
    every += [make(block(name)) for name in ("kl_early_stop", "gradient_monitor", "samples_table")]
    module = tiny_module(iterations=3, kl={"coefficient": 0.1}, alp={})
    fit(module, every[::-1] if reverse else every, folder=tmp_path)
    assert module.control.iteration == 3
