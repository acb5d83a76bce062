"""Every shipped configuration file is documented, composes, instantiates, and every experiment really runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.accelerators import npu
from lightning_rlhf.data.tasks import ArithmeticTask
from tests.support import needs_smollm2

CONF = Path(__file__).resolve().parents[1] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
KEY = re.compile(r"^( *)([A-Za-z_][\w.]*):( |$)")


def keys_without_comment(text: str) -> list[str]:
    """Mapping keys whose line above is not a comment of the same indentation."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        match = KEY.match(line)
        if match and not (number and re.match(rf"^{match[1]}# \S", lines[number - 1])):
            found.append(f"{number + 1}: {line.strip()}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_key_has_a_comment_above_it(file: Path):
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# "), "a file begins with what it is for"
    assert keys_without_comment(text) == []


def test_the_comment_check_sees_what_is_missing():
    assert keys_without_comment("# a\na: 1\nb: 2\n") == ["3: b: 2"]
    assert keys_without_comment("# a\na:\n  b: 1\n  # c\n  c: 2\n# d\n  d: 3\n") == ["3: b: 1", "7: d: 3"]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_"))


def test_groups_are_those_of_the_defaults_list():
    defaults = yaml.safe_load((CONF / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    assert sorted(name.removeprefix("optional ") for name in names) == GROUPS


def needs_file(tmp_path: Path, kind: str) -> Path:
    """A file of two prompts of the given kind."""
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in (1, 2)]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def needs_model(tmp_path: Path) -> Path:
    """A folder with a tiny model, as from_pretrained loads it."""
    from lightning_rlhf.models import build_tiny

    tiny = build_tiny("0123456789+-*= ", hidden_size=32, layers=1, heads=2, max_positions=1024)
    tiny.lm.save_pretrained(tmp_path / "model")
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def needs_mixture(tmp_path: Path) -> Path:
    """A folder with a tiny mixture of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from lightning_rlhf.models import build_tiny

    tokenizer = build_tiny("0123456789+-*= ", hidden_size=32, layers=1, heads=2).tokenizer
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


def needs_reward_model(tmp_path: Path) -> Path:
    """A folder with a tiny reward model."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from lightning_rlhf.models import build_tiny

    tokenizer = build_tiny("0123456789+-*= ", hidden_size=32, layers=1, heads=2).tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward_model")
    tokenizer.save_pretrained(tmp_path / "reward_model")
    return tmp_path / "reward_model"


def needs_text(tmp_path: Path) -> Path:
    """A text of 18 blocks of 32 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("1+1=2 " * 100, encoding="utf-8")
    return path


PLAIN_NEEDS = {
    ("warmup", "sft"): "warmup.lr=1e-3",
    ("callbacks", "overoptimisation_stop"): "evaluate_every=1",
    ("safety", "filter"): "module.safety.words=['13']",
}
"""Overrides without which an option is not complete, where no file is needed."""


def what_it_needs(group: str, option: str, tmp_path: Path) -> list[str]:
    """Overrides without which an option is not complete."""
    if group == "data" and option in ("jsonl", "parquet", "huggingface"):
        return [f"data.train.path={needs_file(tmp_path, option)}"]
    if group == "data" and option == "arithmetic_chat":
        letters = ArithmeticTask(style="chat", operations="+-").vocabulary
        return [f"model.source.vocabulary='{letters}'", "model.source.max_positions=128"]
    if (group, option) == ("logger", "tensorboard"):
        pytest.importorskip("tensorboard")
    if (group, option) == ("logger", "wandb"):
        pytest.importorskip("wandb")
    if group == "trainer" and option.startswith("npu") and not npu.is_available():
        pytest.skip("no Ascend NPU; accelerators/ runs trainer=npu on a pretend one, and shows that it is refused here")
    if group == "rollout" and option == "vllm":
        pytest.importorskip("vllm")
    if group == "model" and option in ("hf", "hf_lora"):
        return [f"model.source.path={needs_model(tmp_path)}"]
    if group == "model" and option == "hf_lora":
        pytest.importorskip("peft")
    if (group, option) == ("alp", "moe"):
        return ["model=hf", f"model.source.path={needs_mixture(tmp_path)}"]
    if (group, option) == ("ptx", "default"):
        return [f"module.ptx.source={needs_text(tmp_path)}", "module.ptx.length=32", "module.ptx.tokens_per_step=64"]
    if plain := PLAIN_NEEDS.get((group, option)):
        return [plain]
    if group == "reward" and option == "reward_model":
        return [f"reward.terms.reward_model.reward.path={needs_reward_model(tmp_path)}"]
    if group == "reward" and option == "math":
        pytest.importorskip("math_verify")
    return []


# Loading SmolLM2 takes long, so its model and its experiment are tested in one iteration only, below.
CASES = [(group, option) for group in GROUPS for option in options(group) if not option.startswith("smollm2")]


@pytest.mark.parametrize(("group", "option"), CASES)
def test_every_option_composes_and_instantiates(compose, tiny_run, tmp_path, group, option):
    from lightning_rlhf import schema
    from lightning_rlhf.assembly import assemble, make_trainer

    usual = ["threads=1", "warmup=none", "logger=none"]  # a warm-up and a new MLflow store take seconds
    usual = [override for override in usual if not override.startswith(f"{group}=")]
    config = schema.check(compose(*usual, f"{group}={option}", *what_it_needs(group, option, tmp_path)))
    if (group, option) == ("trainer", "ray"):
        config["trainer"]["strategy"] = "auto"  # that of Ray exists in its workers only
    if group == "warmup":
        config["warmup"] = config["warmup"] and config["warmup"] | {"steps": 1, "cache_dir": str(tmp_path)}
    parts = assemble(config)
    trainer = make_trainer(config)
    assert len(parts.datamodule.train_prompts) > 0
    assert trainer.max_epochs == 1
    expected = sum(block is not None for block in (config["callbacks"] or {}).values())
    ours = [c for c in trainer.callbacks if type(c).__module__.startswith("lightning_rlhf")]
    assert len(ours) == expected + 3, "the configured callbacks, the ranks' seeds, the random state, and progress"


def test_a_checkpoint_callback_that_counts_optimiser_steps_is_warned_about(compose):
    from lightning_rlhf import schema
    from lightning_rlhf.assembly import make_trainer

    target = "lightning.pytorch.callbacks.ModelCheckpoint"
    block = f"+callbacks.mine={{_target_: {target}, every_n_train_steps: 10}}"
    with pytest.warns(UserWarning, match="every_n_train_steps=10 counts optimiser steps"):
        make_trainer(schema.check(compose("logger=none", block)))


SMALL = {
    "runaway": ["callbacks=minimal"],  # by itself it has none, and so no checkpoint
    "smollm2_arithmetic": ["data.prompts_per_iteration=2", "data.validation.size=2", "module.update.minibatch_size=2"],
}


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(name, marks=[pytest.mark.slow, needs_smollm2] if name.startswith("smollm2") else [])
        for name in options("experiment")
    ],
)
def test_every_experiment_runs_one_iteration(compose, tiny_run, tmp_path, experiment):
    from lightning_rlhf.evaluate import evaluate_checkpoint
    from lightning_rlhf.train import train

    overrides = [f"experiment={experiment}", *tiny_run, *SMALL.get(experiment, [])]
    metrics = train(compose(*overrides))
    assert metrics["clock/iteration"] == 1
    assert (tmp_path / "checkpoints" / "iteration_000001.ckpt").is_file()
    assert (tmp_path / "mlflow" / "mlflow.db").is_file()
    # The scores that the run prints are those of its checkpoint.
    numbers = evaluate_checkpoint(str(tmp_path))
    assert {"eval/exact_match", "eval/reward_mean", "eval/response_length_mean"} <= numbers.keys()
    assert numbers == pytest.approx({name: metrics[name] for name in numbers}, rel=1e-6)
    assert numbers["eval/response_length_mean"] >= 1
