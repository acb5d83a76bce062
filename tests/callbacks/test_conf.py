"""The configuration of callbacks: every key has an effect, groups are as documented, each file works alone and with
others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf import callbacks, memory, schema
from lightning_rlhf.assembly import make, make_trainer
from lightning_rlhf.callbacks import CalibrationError, RLHFCallback
from tests.callbacks.simulated import behaviour
from tests.support import DecisionLog, Recorder, fit, tiny_module

CONF = Path(__file__).resolve().parents[2] / "conf" / "callbacks"

BENCHMARK = {"_target_": "tests.callbacks.test_conf.iterations", "_partial_": True}
"""A benchmark."""


def iterations(module: Any) -> float:
    return 100.0 - module.control.iteration


def long(batch: Any) -> list[float]:
    """A gold score."""
    return [float(len(response)) for response in batch.responses]


def longer_rows(batch: Any) -> list[float]:
    """Another one."""
    return [float(len(response) ** 2) for response in batch.responses]


GOLD, OTHER_GOLD = (
    {"_target_": f"tests.callbacks.test_conf.{name}", "_partial_": True} for name in ("long", "longer_rows")
)
NEEDED: dict[str, dict[str, Any]] = {"overoptimisation_stop": {"gold": GOLD}}
"""What a file leaves to the user."""

CHANGES: dict[str, dict[str, Any]] = {
    "adaptive_kl": {
        **{"target": 0.1, "mode": "doubling", "kp": 0.1, "ki": 0.1, "kd": 0.1, "smoothing": 0.5, "minimum": 0.02},
        **{"maximum": 0.4, "horizon": 100, "figure_every": None},
    },
    "adaptive_ptx": {
        **{"every": 3, "text": "other.txt", "text_field": "words", "blocks": 3, "tolerance": 0.9, "mode": "pid"},
        **{"smoothing": 0.2, "window": 3, "min_improvement": 0.9, "kp": 0.1, "ki": 0.1, "kd": 0.1, "minimum": 0.02},
        **{"maximum": 0.07, "benchmarks": {"size": BENCHMARK}},
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
    "overoptimisation_stop": {
        **{"gold": OTHER_GOLD, "patience": 1, "min_drop": 0.2, "standard_errors": 9.0, "min_spearman": 0.9},
    },
    "prompt_monitor": {"window": 3, "z": 1.0, "min_visits": 5, "min_prompts": 9},
    "prompt_records": {"every_n_iterations": 7, "rows": 3},
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


BESIDE: dict[str, dict[str, Any]] = {
    "adaptive_kl.kp": {"ki": 0.0},
    "adaptive_ptx.text_field": {"text": "other.txt"},
    **{f"adaptive_ptx.{key}": {"mode": "pid"} for key in ("kp", "ki", "kd")},
    "adaptive_kl.horizon": {"mode": "proportional"},
    "adaptive_kl.minimum": {"target": 10.0},
    "kl_guard.soft": {"target": 0.04},
    "kl_guard.token_penalty": {"token_limit": 0.5},
    "oom_guard.min_new_tokens": {"high": 0.2, "low": 0.1},
    **{f"prompt_monitor.{key}": {"min_prompts": 3, "z": 0.5} for key in CHANGES["prompt_monitor"]},
    **{f"efficiency_stop.{key}": {"window": 2} for key in CHANGES["efficiency_stop"]},
}
"""Further settings without which a key has no effect."""


@pytest.fixture(scope="module")
def scored() -> Any:
    """Experience of one small rollout, for all simulated runs."""
    recorder = Recorder()
    fit(tiny_module(iterations=1, update={"epochs": 1, "minibatch_size": 16}), [recorder])
    return recorder.of("on_experience_ready")[0][0]


@pytest.mark.parametrize("name", CHANGES)
def test_every_key_is_in_the_table_of_changes(name: str) -> None:
    assert {key for key in block(name) if key != "_target_"} == set(CHANGES[name])


@pytest.mark.parametrize("key", [f"{name}.{key}" for name, keys in CHANGES.items() for key in keys])
def test_every_key_changes_what_is_done(key: str, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a simulated run; a value that is stored and read by nothing changes nothing."""
    name, _, own = key.partition(".")
    before = block(name) | NEEDED.get(name, {}) | BESIDE.get(key, {})
    seen = []
    for number, settings in enumerate((before, before | {own: CHANGES[name][own]})):
        (tmp_path / str(number)).mkdir()
        seen.append(behaviour(make(settings), scored, tmp_path / str(number), monkeypatch))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", CHANGES)
def test_the_simulated_run_is_the_same_each_time(
    name: str, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a difference comes from the settings."""
    first, second = (tmp_path / "first", tmp_path / "second")
    seen = []
    for folder in (first, second):
        folder.mkdir()
        seen.append(behaviour(make(block(name) | NEEDED.get(name, {})), scored, folder, monkeypatch))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", CHANGES)
def test_the_files_values_are_the_classes_own(name: str) -> None:
    """A callback is the same built in Python or from its file."""
    plain = type(make(block(name)))()
    assert json.dumps(vars(plain), default=repr) == json.dumps(vars(make(block(name))), default=repr)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_hold_what_they_say(compose: Any, group: str) -> None:
    config = schema.check(compose(f"callbacks={group}", "logger=none"))
    assert set(config["callbacks"] or {}) == GROUPS[group]
    built: list[Any] = make_trainer(config).callbacks  # type: ignore[attr-defined]
    names = [type(callback).__name__ for callback in built]
    every = {class_of(name): name for name in {*CHANGES, *GROUPS["default"]}}
    assert {every[name] for name in names if name in every} == GROUPS[group], "each block is built"
    for callback in built:
        name = every.get(type(callback).__name__, "checkpoint")
        if name != "checkpoint":  # which gets the folder of the run
            alone = make(config["callbacks"][name])
            assert json.dumps(vars(callback), default=repr) == json.dumps(vars(alone), default=repr), "by its own block"
    assert ("LRBackoff" in names) == ("lr_backoff" in GROUPS[group])
    if "LRBackoff" in names:
        assert names.index("LRBackoff") > max(names.index(n) for n in ("KLEarlyStop", "KLGuard", "ClipFractionBreak"))


def class_of(name: str) -> str:
    return block(name)["_target_"].rpartition(".")[2]


BRINGS = {"overoptimisation_stop": {"checkpoint"}}
"""Further blocks of a file."""
BESIDE_THE_GROUP = {"overoptimisation_stop": ["evaluate_every=1"]}
"""Further overrides: its checkpoints are kept by what evaluations measure."""


@pytest.mark.parametrize("name", CHANGES)
def test_each_file_works_alone_and_beside_a_group(compose: Any, name: str) -> None:
    words = BESIDE_THE_GROUP.get(name, [])
    assert set(schema.check(compose(f"callbacks={name}", *words))["callbacks"]) == {name} | BRINGS.get(name, set())
    both = schema.check(compose(f"callbacks=[minimal,{name}]", *words))["callbacks"]
    assert set(both) == GROUPS["minimal"] | {name}


ACTING: dict[str, dict[str, Any]] = {
    "clip_fraction_break": {"limit": 1e-6},
    "kl_early_stop": {"target": 1e-9},
    "length_curriculum": {"start": 2},
    "lr_backoff": {"patience": 1},
    "oom_guard": {"min_new_tokens": 1, "high": 0.85},
    "template": {"score": 1e-6, "patience": 100},
    "adaptive_ptx": {"every": 1, "smoothing": 0.0, "tolerance": 0.999999},
    "calibrate": {"every": 1},
    **{name: {} for name in ("adaptive_kl", "advantage_vanish", "alp_figures", "efficiency_stop", "kl_guard")},
    **{name: {} for name in ("gradient_monitor", "samples_table")},
    "overoptimisation_stop": {"gold": GOLD},
    "prompt_monitor": {"min_visits": 2, "min_prompts": 3, "z": 0.1},
    "prompt_records": {},
}
"""Settings by which each callback does something in a short run."""


@pytest.mark.parametrize("reverse", [False, True])
def test_all_callbacks_in_one_run_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """Each callback acts, whichever ones are called before it."""
    assert set(ACTING) == set(CHANGES) | GROUPS["default"] - {"checkpoint"}
    monkeypatch.setattr(memory, "peak_memory_share", lambda device: 0.99)
    own = {name: make(block(name) | settings) for name, settings in ACTING.items()}
    recorder, log = Recorder(), DecisionLog()
    narrow = {"clip_low": 1e-6, "clip_high": 1e-6}
    ptx = {"source": [{"text": "1+1=2 " * 50}], "length": 16, "tokens_per_step": 32, "held_out": 2}
    module = tiny_module(iterations=3, kl={"coefficient": 0.1}, alp={}, ptx=ptx, loss=narrow)
    ordered = list(own.values())[::-1] if reverse else list(own.values())
    evaluating = {"limit_val_batches": 1.0, "val_check_interval": 1}
    trainer = fit(module, [*ordered, recorder], folder=tmp_path, logger=log, **evaluating)
    assert module.control.iteration == 3
    samples = [stats for _, stats in recorder.of("on_experience_ready")]
    assert [row[0] for row in own["adaptive_kl"].history] == [1, 2, 3]
    assert own["adaptive_ptx"].scores == own["efficiency_stop"].scores and own["adaptive_ptx"].baseline
    assert own["efficiency_stop"].scores == [stats.score_mean for stats in samples]
    assert own["advantage_vanish"].sizes == [stats.advantage_raw_abs_mean for stats in samples]
    assert own["alp_figures"].iterations == [1, 2, 3] and own["template"].solved == 3
    assert own["kl_guard"].progress.seen == 3
    assert own["gradient_monitor"].steps == sum(stats.finite for stats in recorder.of("on_minibatch_end"))
    assert {"grad_norm/actor_average", "calibrate/logprob_abs_diff_mean"} <= trainer.callback_metrics.keys()
    reasons = " ".join(reason for _, reason in log.of("stop_epochs"))
    assert "kl/old" in reasons and "clip fraction" in reasons
    assert log.of("lower_learning_rate") and module.control.value("lr_scale") < 1
    assert [iteration for iteration, _ in log.of("shorten_responses")] == [1, 2, 3][: len(log.of("shorten_responses"))]
    assert own["oom_guard"].length_share < 1
    assert samples[0].response_length_mean <= 2, "the curriculum's first length"
    pictures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"adaptive_kl.png", "alp_sigma_000003.png"} <= pictures
    assert (tmp_path / "samples" / "iteration_000001.jsonl").is_file()
    assert len(own["prompt_monitor"].statistics) > 8
    assert [check[0] for check in own["overoptimisation_stop"].history] == [1, 2, 3]
    assert len(list((tmp_path / "prompts").rglob("*.parquet"))) == 3
