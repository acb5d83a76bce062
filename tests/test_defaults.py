"""One default: the value that a shipped file gives an argument equals the argument's own default.

Every key of every file in ``conf/`` that feeds a signature (a ``_target_``, or a settings dataclass) is compared after
the file is composed. Intended differences are in ``DEVIATIONS``, with the reason.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.callbacks import KLEarlyStop
from lightning_rlhf.distributed.ray_settings import RaySettings
from lightning_rlhf.mixins.alp_settings import ALPSettings, RouterSettings
from lightning_rlhf.mixins.correction_settings import RolloutCorrectionSettings
from lightning_rlhf.mixins.ptx_settings import PTXSettings
from lightning_rlhf.rewards.safety import SafetySettings
from lightning_rlhf.schema.batch_sizes import settings_of
from lightning_rlhf.schema.locate import locate, parameters_of
from lightning_rlhf.schema.shipped import flatten
from lightning_rlhf.settings import PPOSettings

CONF = Path(__file__).resolve().parents[1] / "conf"
REQUIRED = object()
"""The signature has no default to compare with."""

PPO = PPOSettings()
SETTINGS: dict[str, Any] = {
    **{f"module.{field.name}": getattr(PPO, field.name) for field in fields(PPO)},
    "module.alp": ALPSettings(),
    "module.alp.router": RouterSettings(),
    "module.ptx": PTXSettings,
    "module.rollout_correction": RolloutCorrectionSettings(),
    "module.rollout_correction.adaptive": RolloutCorrectionSettings().adaptive,
    "module.safety": SafetySettings(),
    "trainer.ray": RaySettings,
}
"""Blocks read by a settings dataclass: an instance with all defaults, or the class if some fields are required."""

GENERAL = ["model=hf", "model.source.path=PATH", "data=jsonl", "data.train.path=PATH", "rollout=hf", "logger=none"]
"""The overrides that every other file is composed with: a pre-trained model, no recipe."""
NEEDED = {
    "data/huggingface": ["data.train.path=PATH"],
    "reward/reward_model": ["reward.terms.reward_model.reward.path=PATH"],
}


def files() -> list[str]:
    """Every file of a group, as ``group/option``, without recipes, which are meant to differ."""
    found = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.glob("*/*.yaml"))
    return [name for name in found if not name.startswith("recipe/")]


@functools.cache
def composed(name: str) -> DictConfig:
    """The configuration with this file in it."""
    group, option = name.split("/")
    overrides = [word for word in GENERAL if not word.startswith((f"{group}=", f"{group}."))]
    if group == "experiment":
        overrides = ["logger=none"]
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        return hydra.compose("train", overrides=["output_dir=.", *overrides, f"{group}={option}"])


def written(name: str) -> Iterator[str]:
    """Dotted keys, at their final place, of a file and those in its defaults list."""
    text = (CONF / f"{name}.yaml").read_text(encoding="utf-8")
    package = re.match(r"# @package (\S+)\n", text)
    prefix = {"_global_": ""}.get(package[1], f"{package[1]}.") if package else f"{name.split('/')[0]}."
    content = yaml.safe_load(text) or {}
    yield from (key for key, _ in flatten({k: v for k, v in content.items() if k != "defaults"}, prefix))
    for parent in parents(name):
        yield from written(parent)


def parents(name: str) -> list[str]:
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    own = [entry for entry in content.get("defaults", ()) if isinstance(entry, str) and entry != "_self_"]
    return [f"{name.split('/')[0]}/{entry}" for entry in own]


def default_of(key: str, config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The argument that a key feeds, as a dotted key, and its default; ``None`` if it feeds no signature."""
    if key.startswith("model.lr."):
        return default_of(f"module.{key.removeprefix('model.lr.')}.lr", config)
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        owner, name = ".".join(parts[:length]), parts[length]
        if owner in SETTINGS:
            return f"{owner}.{name}", _default_of_setting(SETTINGS[owner], name)
        block = OmegaConf.select(config, owner)
        if isinstance(block, Mapping) and "_target_" in block:
            parameters = parameters_of(locate(block["_target_"]))
            if name not in parameters:
                return None
            default = parameters[name].default
            return f"{owner}.{name}", REQUIRED if default is inspect.Parameter.empty else default
    return None


def _default_of_setting(settings: Any, name: str) -> Any:
    if not inspect.isclass(settings):
        return getattr(settings, name)
    [field] = [field for field in fields(settings) if field.name == name]
    return REQUIRED if field.default is MISSING else field.default


def plain(value: Any) -> Any:
    """Comparable: lists for all sequences, and blocks of settings as blocks."""
    if is_dataclass(value) and not inspect.isclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def compared(name: str) -> dict[str, tuple[Any, Any]]:
    """Value and default of every argument with a default that a file, or a file of its defaults list, feeds."""
    config = composed(name)
    found = {}
    for key in written(name):
        argument = None if key.endswith("_target_") else default_of(key, config)
        if argument is not None and argument[1] is not REQUIRED:
            given = OmegaConf.select(config, argument[0], throw_on_missing=False)
            found[argument[0]] = plain(given), plain(argument[1])
    return found


def deviations(name: str) -> dict[str, tuple[Any, Any]]:
    """Arguments with another value than their default, unless a file of the defaults list already gives that value."""
    inherited = {key: value for parent in parents(name) for key, value in compared(parent).items()}
    differing = {key: (given, default) for key, (given, default) in compared(name).items() if given != default}
    return {key: value for key, value in differing.items() if inherited.get(key) != value}


VARIANTS = {
    "a named variant: what its file writes is what it is": (
        *("alp/channel", "alp/decoupled", "alp/int8", "alp/moe"),
        *("callbacks/fixed_kl", "callbacks/paranoid", "callbacks/stability"),
        *("data/arithmetic_chat", "warmup/half_right", "warmup/tiny_arithmetic"),
        *(f"rollout_correction/{name}" for name in ("bypass", "bypass_reinforce", "extreme", "geometric", "npu")),
        *(f"rollout_correction/{name}" for name in ("geometric_rs_token_tis", "precision", "sequence_mis")),
        *(f"rollout_correction/{name}" for name in ("sequence_tis", "stability", "token_tis")),
    ),
    "an experiment chooses its settings on purpose": ("experiment/runaway", "experiment/smollm2_arithmetic"),
}
"""Files that differ as a whole, by reason."""

MODELS = ("hf_lora", "smollm2", "tiny")
TRAINER = ("devices", "precision", "deterministic", "enable_progress_bar", "enable_model_summary")
RATES = "learning rates come with the model"
LIGHTNING = "lightning.Trainer's own defaults are not the kit's"
DEVIATIONS = {
    ("callbacks/overoptimisation_stop", "callbacks.checkpoint.monitor"): "keeps the checkpoint that the stop names",
    ("data/arithmetic", "data.validation.split"): "one class builds both splits, and rows are mostly for training",
    ("data/arithmetic", "data.validation.size"): "enough to see a difference, few enough for seconds",
    ("data/arithmetic", "data.max_prompt_tokens"): "problems are short; a longer one is a mistake",
    ("data/arithmetic", "data.validation_batch_size"): "short prompts, all of them at once",
    ("model/hf_lora", "model.policy.lora"): "an adapter is what the file is for",
    **{(f"model/{name}", f"module.{part}.lr"): RATES for name in MODELS for part in ("actor", "critic")},
    **{("trainer/default", f"trainer.{name}"): LIGHTNING for name in TRAINER},
    ("trainer/bf16", "trainer.precision"): "what the file is for",
    ("trainer/npu", "trainer.accelerator"): "what the file is for",
    ("trainer/npu", "trainer.precision"): "NPUs compute in bfloat16",
    ("trainer/npu_ddp", "trainer.strategy"): "what the file is for",
    ("trainer/npu_fsdp2", "trainer.strategy"): "what the file is for",
    ("trainer/ray", "trainer.accelerator"): "workers reserve a kind of device, so it cannot be found on the spot",
    ("trainer/ray", "trainer.enable_progress_bar"): "in the output of workers a bar is a line for every step",
}
"""Single values that differ, by file and argument, and why."""


@pytest.mark.parametrize("name", files())
def test_values_of_a_file_are_the_defaults_of_its_signatures(name: str) -> None:
    found = deviations(name)
    if any(name in variants for variants in VARIANTS.values()):
        assert found, "in VARIANTS, and does not differ"
        return
    allowed = {key for file, key in DEVIATIONS if file == name}
    assert {key: value for key, value in found.items() if key not in allowed} == {}, "value of the file, own default"
    assert allowed <= set(found), "in DEVIATIONS, and does not differ"


def test_deviations_are_of_files_that_exist() -> None:
    assert {file for file, _ in DEVIATIONS} | {file for group in VARIANTS.values() for file in group} <= set(files())


def test_every_settings_block_and_key_is_compared() -> None:
    """Each settings block, and each key of every file but those that feed no signature."""
    assert set(SETTINGS) <= {key.rpartition(".")[0] for name in files() for key in compared(name)}
    unread = {key for name in files() for key in written(name) if default_of(key, composed(name)) is None}
    assert {key for key in unread if not key.endswith("_target_")} == {"run_name", "iterations"}, "keys of train.yaml"


@pytest.mark.parametrize(
    "target",
    ["ppo.PPOModule", "data.PromptDataModule", "warmup.warm_up", "models.build_tiny", "models.build_policy"],
)
def test_the_seed_of_a_run_is_the_default_of_all_that_take_it(target: str) -> None:
    top = yaml.safe_load((CONF / "train.yaml").read_text(encoding="utf-8"))
    assert parameters_of(locate(f"lightning_rlhf.{target}"))["seed"].default == top["seed"]


def test_a_changed_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: one default moved in a dataclass, and one in a class that a file names."""
    changed = replace(PPO.kl, coefficient=0.5)
    monkeypatch.setitem(SETTINGS, "module.kl", changed)
    compared.cache_clear()
    monkeypatch.setattr(KLEarlyStop.__init__, "__defaults__", (0.2, *KLEarlyStop.__init__.__defaults__[1:]))  # type: ignore[index]
    assert deviations("module/ppo") == {"module.kl.coefficient": (0.02, 0.5)}
    assert deviations("callbacks/kl_early_stop") == {"callbacks.kl_early_stop.target": (0.1, 0.2)}
    compared.cache_clear()


@pytest.mark.parametrize("block", [{"clip_norm": 2.0}, {}])
def test_a_partial_block_brings_the_files_values(block: dict[str, Any]) -> None:
    """In Python, and as the check of a configuration reads it."""
    file: Any = OmegaConf.to_container(composed("model/hf").module.actor, resolve=True)
    expected = file | block
    assert asdict(PPOSettings.from_blocks(actor=block).actor) == expected
    read = settings_of({"module": {"actor": block}})
    assert read is not None and asdict(read.actor) == expected


def documented() -> dict[str, str]:
    """Keys and values of the table in docs/concepts.md; a key without a block has the block of the key before."""
    text = (CONF.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = text.partition("## Where the defaults come from\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE)
    found, block = {}, ""
    for names, values in rows:
        general = values.partition(";")[0].split(", ")
        for name, value in zip(re.findall(r"`(\S+?)`", names), general, strict=False):
            block = name.rpartition(".")[0] or block
            found[f"{block}.{name.rpartition('.')[2]}"] = value.split()[0].strip("`,")
    return found


def test_the_table_of_defaults_in_the_docs_is_true() -> None:
    config = composed("callbacks/default")
    table = documented()
    assert len(table) > 12
    for key, value in table.items():
        given = OmegaConf.select(config, key)
        assert value == given if isinstance(given, str) else float(value) == given, key
