"""A block of rollout correction pasted from veRL, in the three versions of its keys."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_rlhf import cli, schema
from lightning_rlhf.assembly import assemble
from lightning_rlhf.errors import SettingError
from lightning_rlhf.mixins.correction_settings import correction_settings
from lightning_rlhf.schema import ConfigError
from lightning_rlhf.schema.locate import parameters_of
from lightning_rlhf.schema.verl import adopt, translate
from lightning_rlhf.train import train

SEED_BLOCK = {
    "rollout_is": "geometric",
    "rollout_is_threshold": 3.0,
    "rollout_rs": "sequence",
    "rollout_rs_threshold": 2.5,
    "rollout_token_veto_threshold": 1e-4,
}


@pytest.mark.parametrize(
    ("pasted", "ours"),
    [
        (SEED_BLOCK, SEED_BLOCK),
        (
            {"rollout_rs": ["token_k1", "seq_max_k3"], "rollout_rs_threshold": ["0.5_2.0", 0.3]},
            {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.3"},
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", "bypass_mode": True},
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", "bypass_mode": True},
        ),
        (
            {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True, "rollout_is": "token"},
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
        ),
        ({"bypass_mode": True, "use_policy_gradient": False}, {"bypass_mode": True}),
    ],
    ids=["second era", "third era", "third era, one rule", "second era, early names", "off"],
)
def test_blocks_of_the_nested_eras_are_converted(pasted: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translate(pasted) == ours
    assert correction_settings(ours) is not None


@pytest.mark.parametrize(
    ("pasted", "key", "said"),
    [
        (
            {"rollout_is": True, "rollout_is_level": "geometric", "rollout_is_mode": "mask",
             "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": None, "rollout_is_veto_threshold": 1e-4},
            "algorithm.rollout_is",
            "module.rollout_correction.rollout_is=geometric module.rollout_correction.rollout_is_mode=mask "
            "module.rollout_correction.rollout_is_threshold=2.0 "
            "module.rollout_correction.rollout_token_veto_threshold=0.0001",
        ),
        ({"rollout_is": False, "rollout_is_threshold": 2.0}, "algorithm.rollout_is", "computed and not applied"),
        ({"rollout_is": True}, "algorithm.rollout_is", "module.rollout_correction.rollout_is=token"),
        ({"rollout_is_threshold": 2.0}, "algorithm.rollout_is_threshold", "rollout_is_threshold=2.0"),
    ],
)  # fmt: skip
def test_flat_blocks_of_the_first_era_are_refused_with_the_keys_to_write(
    pasted: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(SettingError) as caught:
        adopt({"algorithm": pasted})
    assert caught.value.key == key and said in caught.value.allowed


@pytest.mark.parametrize("block", [{"rollout_is": True}, {"rollout_is_level": "token"}])
def test_keys_of_the_first_era_inside_the_nested_block_are_refused(block: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"algorithm\.rollout_correction\.rollout_is"):
        adopt({"algorithm": {"rollout_correction": block}})


@pytest.mark.parametrize("block", [None, "token", ["token"]])
def test_a_value_that_is_not_a_block_is_refused(block: Any) -> None:
    with pytest.raises(SettingError, match="a block of keys"):
        adopt({"algorithm": {"rollout_correction": block}})


def test_a_configuration_without_a_pasted_block_is_left_alone() -> None:
    config = {"module": {"update": {}}, "seed": 1}
    assert adopt(config) == (config, [])


def test_pasted_on_the_command_line(compose: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    overrides = [f"+algorithm.rollout_correction.{name}={value}" for name, value in SEED_BLOCK.items()]
    with caplog.at_level(logging.INFO):
        plain = schema.check(compose(*overrides, "+actor_rollout_ref.rollout.calculate_log_probs=true"))
    assert plain["module"]["rollout_correction"] == SEED_BLOCK
    assert "algorithm" not in plain and "actor_rollout_ref" not in plain
    said = [record.message for record in caplog.records if record.name == "lightning_rlhf.schema.checks"]
    assert len(said) == 2 and "rollout_is=geometric, rollout_is_threshold=3.0, rollout_rs=sequence" in said[0]


def test_pasted_over_a_preset(compose: Callable[..., Any]) -> None:
    plain = schema.check(compose("rollout_correction=stability", "+algorithm.rollout_correction.rollout_is=sequence"))
    settings = correction_settings(plain["module"]["rollout_correction"])
    assert settings is not None
    assert (settings.rollout_is, settings.rollout_is_threshold, settings.rollout_rs) == ("sequence", 3.0, "token")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+algorithm.rollout_correction.rollout_is_levell=token"], "algorithm.rollout_correction.rollout_is_levell"),
        (["+algorithm.rollout_correction.rollout_rs=token"], "+algorithm.rollout_correction.rollout_rs_threshold"),
        (["rollout_correction=monitor", "+algorithm.rollout_correction.rollout_rs=token"],
         "module.rollout_correction.rollout_rs_threshold"),
        (["+algorithm.rollout_is=true"], "algorithm.rollout_is"),
        (["+algorithm.rollout_correction.rollout_is=token", "+algorithm.gamma=1.0"], "algorithm.gamma"),
        (["+actor_rollout_ref.rollout.calculate_log_probs=false"], "actor_rollout_ref.rollout.calculate_log_probs"),
        (["rollout_correction=monitor", "module.rollout_correction.rollout_is=tokens"],
         "module.rollout_correction.rollout_is"),
        (["+rollout_correction.rollout_is=token"], "rollout_correction.rollout_is"),
        (["+module.rollout_corection={}"], "module.rollout_corection"),
    ],
)  # fmt: skip
def test_problems_name_the_key(compose: Callable[..., Any], overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.check(compose(*overrides))
    assert key in [problem.key for problem in caught.value.problems]


FILES = {
    "era1": {"algorithm": {"rollout_is": True, "rollout_is_level": "token", "rollout_is_threshold": 2.0}},
    "era2": {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}},
    "era3": {"algorithm": {"rollout_correction": {
        "rollout_is": "sequence", "rollout_rs": ["token_k1", "seq_max_k3"], "rollout_rs_threshold": ["0.5_2.0", 0.3]}}},
}  # fmt: skip
"""A block of each era in a file of the user's own."""

PRINT = ["--cfg", "job"]
OVERRIDDEN = {
    "key of the file": ("era2", "algorithm.rollout_correction.rollout_is_threshold=3", 0, ""),
    "our name of it": (
        "era2",
        "module.rollout_correction.rollout_is_threshold=3",
        2,
        "changed there: algorithm.rollout_correction.rollout_is_threshold=3",
    ),
    "our name of it with a plus": (
        "era2",
        "+module.rollout_correction.rollout_is_threshold=3",
        2,
        "sets this, too, and would decide; write algorithm.rollout_correction.rollout_is_threshold=3",
    ),
    "misspelt": (
        "era2",
        "algorithm.rollout_correction.rollout_is_treshold=3",
        2,
        "did you mean algorithm.rollout_correction.rollout_is_threshold?",
    ),
    "key that the file lacks": (
        "era2",
        "algorithm.rollout_correction.rollout_rs=token",
        2,
        "+algorithm.rollout_correction.rollout_rs=token",
    ),
    "our name of a key that the file lacks": (
        "era2",
        "module.rollout_correction.rollout_rs=token",
        2,
        "changed there: +algorithm.rollout_correction.rollout_rs=token",
    ),
    "wrong value": (
        "era2",
        "algorithm.rollout_correction.rollout_is=tokens",
        2,
        "algorithm.rollout_correction.rollout_is =",
    ),
    "list made shorter": (
        "era3",
        "algorithm.rollout_correction.rollout_rs=[token_k1]",
        2,
        "algorithm.rollout_correction.rollout_rs_threshold = '0.5_2.0,0.3'",
    ),
    "first era": ("era1", "algorithm.rollout_is_threshold=3", 2, "module.rollout_correction.rollout_is_threshold=3"),
}


@pytest.mark.parametrize(("file", "typed", "code", "said"), OVERRIDDEN.values(), ids=OVERRIDDEN.keys())
def test_a_block_from_a_file_then_an_override_of_one_of_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, file: str, typed: str, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    text = "# @package _global_\n" + yaml.safe_dump(FILES[file])
    (folder / f"{file}.yaml").write_text(text, encoding="utf-8")
    words = ["train", "--config-dir", "mine", f"experiment={file}", typed, *(PRINT if code == 0 else [])]
    assert cli.main(words) == code
    out, error = capsys.readouterr()
    assert said in error and "1 problems" not in error and "2 problems" not in error
    if code == 0:
        plain = schema.check(OmegaConf.create({k: v for k, v in yaml.safe_load(out).items()} | {"output_dir": "."}))
        assert plain["module"]["rollout_correction"] == {"rollout_is": "token", "rollout_is_threshold": 3}


def test_a_pasted_block_acts(compose: Callable[..., Any], tiny_run: list[str]) -> None:
    overrides = ["+algorithm.rollout_correction.rollout_is=token", "logger=none", "callbacks=none"]
    metrics = train(compose(*tiny_run, *overrides))
    assert metrics["rollout_corr/is_used_mean"] == pytest.approx(1.0, abs=1e-3)


PRESETS: dict[str, dict[str, Any]] = {
    "monitor": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    "token_tis": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence_tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "geometric": {"rollout_is": "geometric", "rollout_rs": None},
    "sequence_mis": {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 2.0},
    "geometric_rs_token_tis": {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.99},
    "bypass": {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None},
    "bypass_reinforce": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
    "precision": {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_rs": None},
    "stability": {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_rs": "token"},
    "extreme": {"rollout_token_veto_threshold": 1e-4, "bypass_mode": False},
    "npu": {"rollout_is": "token", "rollout_is_threshold": 5.0},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_reach_the_module_and_can_be_tuned(compose: Callable[..., Any], preset: str) -> None:
    tuned = ["module.rollout_correction.full_every=7", "warmup=none", "logger=none", "threads=1"]
    module = assemble(schema.check(compose(f"rollout_correction={preset}", *tuned))).module
    settings = module._correction.settings
    assert {name: getattr(settings, name) for name in PRESETS[preset]} == PRESETS[preset] and settings.full_every == 7
    assert assemble(schema.check(compose(*tuned[1:]))).module._correction is None


def test_every_preset_is_in_the_table() -> None:
    from importlib.resources import files

    shipped = {f.name.removesuffix(".yaml") for f in (files("lightning_rlhf.conf") / "rollout_correction").iterdir()}
    assert shipped == {*PRESETS, "none"}


def test_parameters_of_a_cooperative_class_include_those_of_its_mro() -> None:
    class Mixin:
        def __init__(self, *args: Any, mine: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Base:
        def __init__(self, first: int, *, second: int = 2) -> None: ...

    class Both(Mixin, Base): ...

    assert list(parameters_of(Both)) == ["first", "second", "mine"]
    assert list(parameters_of(Mixin)) == ["args", "mine", "kwargs"], "takes whatever it is given"
