"""A key that nothing reads is a bug: changing any key of the shipped configuration has a visible effect.

``CHANGES`` names, for every leaf key, another value (and what must be set beside it). Keys of callbacks are
seen in a simulated run, those of logger and trainer in the object that is built, all others in a real run of two
iterations.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_rlhf
from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make, make_trainer
from lightning_rlhf.models import Actor, fingerprint
from tests.callbacks.simulated import behaviour
from tests.support import Recorder, fit, tiny_module

PACKAGE = Path(lightning_rlhf.__file__).resolve().parent

BASE = [
    "logger=none",
    "threads=1",
    "iterations=2",
    "model.source.hidden_size=32",
    "model.source.layers=1",
    "model.source.heads=2",
    "warmup.steps=2",
    "warmup.batch_size=4",
    "data.train.max_value=9",
    "data.train.held_out=0.5",
    "data.validation.size=8",
    "data.prompts_per_iteration=6",
    "rollout.samples=2",
    "rollout.max_new_tokens=4",
    "module.update.minibatch_size=6",
    "model.lr.actor=0.01",
    "model.lr.critic=0.01",
    "module.actor.warmup_iterations=0",
    "+reward.terms.even={weight: 1.0, reward: {_target_: tests.support.even_digits}}",
    "callbacks=none",
    "trainer.enable_progress_bar=false",
]
"""Two iterations of two epochs of two minibatches, and a reward that an untrained model gets at times."""

LORA = ["model.policy.lora={r: 2}"]
GRPO = ["module.advantage.estimator=grpo", "model.policy.critic=none"]
VOCABULARY = "".join(sorted(set("0123456789+-*= What is Answer with the number only?.")))
LETTERS = [f"model.source.vocabulary='{VOCABULARY}'", "model.source.max_positions=128", "data.max_prompt_tokens=80"]
GROUPS = ["data.group_column=answer"]
CHAT = ["data.train.style=chat", *LETTERS]

Change = tuple[str, list[str]]
RUN: dict[str, Change | str] = {
    "seed": "2",
    "iterations": "3",
    "evaluate_every": "1",
    "threads": "2",
    "module.update.epochs": "1",
    "module.update.minibatch_size": "12",
    "module.update.micro_batch_tokens": "24",
    "module.update.micro_batch_size": "2",
    "module.update.score_tokens": "24",
    "module.advantage.estimator": ("rloo", GRPO),
    "module.advantage.gamma": "0.5",
    "module.advantage.gae_lambda": "0.5",
    "module.advantage.whiten": "false",
    "module.advantage.normalise_std": ("false", GRPO),
    "module.termination.min_tokens": ("3", ["module.termination.early=penalty"]),
    "module.termination.early": "penalty",
    "module.termination.early_penalty": (
        "-1.0",
        ["module.termination.early=penalty", "module.termination.min_tokens=3"],
    ),
    "module.termination.truncated": "bootstrap",
    "module.termination.truncated_penalty": ("-1.0", ["module.termination.truncated=penalty"]),
    "module.termination.overlong_cache": ("0.9", ["module.termination.truncated=soft_overlong"]),
    "module.termination.overlong_factor": ("0.5", ["module.termination.truncated=soft_overlong"]),
    "module.reward_processing.normalise": "batch",
    "module.reward_processing.clip": "0.1",
    "module.groups.weights": ("{9: 0.1}", GROUPS),
    "module.groups.normalise": (
        "rewards",
        [*GROUPS, "module.groups.min_samples=2", "module.reward_processing.normalise=batch"],
    ),
    "module.groups.min_samples": (
        "2",
        [*GROUPS, "module.groups.normalise=rewards", "module.reward_processing.normalise=batch"],
    ),
    "module.loss.clip_low": "0.0001",
    "module.loss.clip_high": "0.0001",
    "module.loss.dual_clip": "1.0001",
    "module.loss.ratio_level": "sequence",
    "module.loss.aggregation": "seq-mean-token-sum",
    "module.loss.value_clip": "0.0001",
    "module.loss.value_coefficient": "0.1",
    "module.loss.entropy_coefficient": "0.1",
    "module.kl.coefficient": "0.9",
    "module.kl.estimator": "k3",
    "module.kl.placement": ("loss", ["module.kl.estimator=k3"]),
    "module.actor.lr": "0.02",
    "module.actor.clip_norm": "0.001",
    "module.actor.warmup_iterations": "2",
    "module.actor.weight_decay": "0.5",
    "module.critic.lr": "0.02",
    "module.critic.clip_norm": "0.001",
    "module.critic.warmup_iterations": "2",
    "module.critic.weight_decay": "0.5",
    "module.optimizer.betas": "[0.5,0.5]",
    "module.optimizer.eps": "0.1",
    "module.optimizer.schedule": "constant",
    "module.optimizer.final_lr_fraction": ("0.5", ["module.optimizer.schedule=linear"]),
    "model.source.vocabulary": "'9876543210+-*= '",
    "model.source.hidden_size": "16",
    "model.source.intermediate_size": "16",
    "model.source.layers": "2",
    "model.source.heads": "4",
    "model.source.key_value_heads": "1",
    "model.source.max_positions": "32",
    "model.source.tie_embeddings": "true",
    "model.source.add_bos": "true",
    "model.source.seed": "5",
    "model.source.dtype": "bfloat16",
    "model.lr.actor": "0.02",
    "model.lr.critic": "0.02",
    "model.policy.critic": "separate",
    "model.policy.reference": ("none", ["module.kl.coefficient=0"]),
    "model.policy.lora": "{r: 2}",
    "model.policy.activation_checkpointing": "true",
    "model.policy.seed": ("5", LORA),
    "data.train.operations": "'*'",
    "data.train.min_value": "3",
    "data.train.max_value": "8",
    "data.train.style": ("chat", LETTERS),
    "data.train.template": "'{a}{op}{b} ='",
    "data.train.answer_format": "'{answer:04d}'",
    "data.train.split": "all",
    "data.train.held_out": "0.6",
    "data.train.size": "7",
    "data.train.seed": ("5", ["data.train.size=7"]),
    "data.validation.operations": "'*'",
    "data.validation.min_value": "3",
    "data.validation.max_value": "8",
    "data.validation.style": ("chat", LETTERS),
    "data.validation.template": "'{a}{op}{b} ='",
    "data.validation.answer_format": "'{answer:04d}'",
    "data.validation.split": "all",
    "data.validation.held_out": "0.6",
    "data.validation.size": "9",
    "data.validation.seed": "5",
    "data.prompts_per_iteration": "7",
    "data.max_prompt_tokens": ("4", ["data.train.max_value=12"]),
    "data.prompt_field": "answer",
    "data.system_prompt": ("'Answer'", CHAT),
    "data.text_as_chat": "true",
    "data.chat_template_kwargs": ("{extra: '1'}", CHAT),
    "data.shuffle": "false",
    "data.group_column": "answer",
    "data.validation_size": ("5", ["data.validation=null"]),
    "data.validation_limit": "3",
    "data.validation_batch_size": "3",
    "reward.terms.exact_match.weight": "2.0",
    "reward.terms.characters.weight": "2.0",
    "reward.terms.characters.reward.answer_field": "prompt",
    "reward.terms.exact_match.reward.answer_field": "prompt",
    "reward.terms.exact_match.reward.strip": ("false", ["data.train.answer_format='{answer} '"]),
    "reward.terms.exact_match.reward.casefold": "true",
    "rollout.max_new_tokens": "3",
    "rollout.samples": "3",
    "rollout.temperature": "0.5",
    "rollout.top_k": "2",
    "rollout.top_p": "0.5",
    "rollout.stop_token_ids": "[5,6,7]",
    "rollout.ignore_eos": "true",
    "rollout.max_batch_tokens": "20",
    "rollout.lag": "1",
    "warmup.steps": "3",
    "warmup.batch_size": "5",
    "warmup.lr": "0.1",
    "warmup.target": "100",
    "warmup.answer_field.answer": "9",
    "warmup.answer_field.rambling": "9",
}

BUILT: dict[str, Change | str] = {
    "callbacks.kl_early_stop.target": "0.5",
    "callbacks.kl_early_stop.per_minibatch": "true",
    "callbacks.kl_early_stop.hard_limit": "0.5",
    "callbacks.kl_early_stop.rollback": ("true", ["callbacks.kl_early_stop.hard_limit=0.5"]),
    "callbacks.kl_early_stop.patience": "3",
    "callbacks.gradient_monitor.decay": "0.5",
    "callbacks.gradient_monitor.max_nonfinite": "1",
    "callbacks.gradient_monitor.warn_clipped": "0.5",
    "callbacks.gradient_monitor.warn_far_below": "0.5",
    "callbacks.samples_table.every_n_iterations": "1",
    "callbacks.samples_table.rows": "3",
    "callbacks.calibrate.prompts": "3",
    "callbacks.calibrate.tokens": "3",
    "callbacks.calibrate.every": "3",
    "callbacks.calibrate.limit": "0.5",
    "callbacks.checkpoint.dirpath": "/tmp/elsewhere",
    "callbacks.checkpoint.every_n_iterations": "3",
    "callbacks.checkpoint.keep": "5",
    "callbacks.checkpoint.monitor": "reward/mean",
    "callbacks.checkpoint.mode": "min",
    "logger.mlflow.run_dir": "elsewhere",
    "logger.mlflow.experiment_name": "other",
    "logger.mlflow.run_name": "mine",
    "logger.mlflow.tracking_uri": "http://127.0.0.1:9",
    "logger.mlflow.store_dir": "elsewhere",
    "logger.mlflow.resume_from": "earlier",
    "logger.mlflow.branch_from": "parent",
    "logger.mlflow.branch_iteration": ("6", ["logger.mlflow.branch_from=parent"]),
    "logger.mlflow.run_id": "0123456789abcdef0123456789abcdef",
    "logger.mlflow.tags": "{a: b}",
    "logger.mlflow.flush_timeout": "1",
    "logger.mlflow.retry_seconds": "1",
    "trainer.precision": "bf16-mixed",
    "trainer.enable_model_summary": "true",
}

SEEN_OTHERWISE = {
    *("output_dir", "run_name", "warmup.cache_dir", "trainer.deterministic"),
    *("resume", "branch"),  # runs/test_resume_command.py: a resumed run, a branch of it
    *("progress_every", "trainer.enable_progress_bar"),  # reporting/test_progress.py
    *("data.blacklist", "data.conservative", "data.conservative_beta"),  # data/test_lists.py: what is drawn and paid
    "data.max_groups",  # data/test_groups.py: a column with more values is refused
    "resume_on_other_data",  # data/test_fingerprint.py: other data is refused without it
    "rollout.max_staleness",  # rollout/test_ahead.py: a stale rollout is drawn again
    "callbacks.samples_table.unsafe_rows",  # callbacks/test_samples_table.py: how many unsafe draws are written
    "callbacks.checkpoint.asynchronous",  # checkpoint/test_background.py: whether training goes on meanwhile
    "callbacks.checkpoint.probe",  # checkpoint/test_verification.py: what the record says was checked
    "callbacks.checkpoint.copy_to",  # checkpoint/test_copies.py: what lies there
    "model.policy.npu_fused",  # accelerators/test_npu_fused.py: layers are exchanged
    "trainer.accelerator",  # test_cli.py: an unknown one is refused
    "unsupported_precision",  # test_precision.py: what happens without the arithmetic
    "trainer.devices",  # schema/test_checks.py: invalid values are refused
}
"""Keys with their own test, here or in the file that the comment names."""


def leaves(compose) -> list[str]:
    return [key for key, _ in schema.flatten(schema.check(compose())) if not key.endswith("_target_")]


def test_every_key_has_an_entry(compose):
    assert set(leaves(compose)) == set(RUN) | set(BUILT) | SEEN_OTHERWISE


def test_every_target_is_read(compose):
    for key, _ in schema.flatten(schema.check(compose())):
        if key.endswith("_target_"):
            with pytest.raises(schema.ConfigError, match="no_such_module"):
                schema.check(compose(f"{key}=no_such_module.Thing"))


def overrides(key: str, table: dict[str, Change | str]) -> tuple[list[str], list[str]]:
    """Overrides without and with the change."""
    change = table[key]
    value, beside = (change, []) if isinstance(change, str) else change
    return [*beside], [*beside, f"{key}={value}"]


@pytest.mark.slow
@pytest.mark.parametrize("key", RUN)
def test_a_run_changes(compose, tmp_path_factory, key):
    before, after = overrides(key, RUN)
    assert observe(compose, tmp_path_factory, before) != observe(compose, tmp_path_factory, after)


_SEEN: dict[tuple[str, ...], str] = {}


def observe(compose, tmp_path_factory, changes: list[str]) -> str:
    """All visible effects of a run, as one text; runs with the same changes are run once."""
    if tuple(changes) not in _SEEN:
        folder = tmp_path_factory.mktemp("run")
        config = schema.check(compose(*BASE, f"warmup.cache_dir={folder}", *changes))
        _SEEN[tuple(changes)] = json.dumps(run(config, folder), sort_keys=True, default=repr)
    return _SEEN[tuple(changes)]


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A whole run: weights, metrics, shapes of every forward pass, and what the model looks like."""
    shapes: list[Any] = []
    forward = Actor.forward

    @functools.wraps(forward)
    def recorded(self: Actor, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append((list(ids.shape), torch.is_grad_enabled()))
        return forward(self, ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "forward", recorded)
        parts = assemble(config)
        used = torch.get_num_threads()
        trainer = make_trainer(config | {"output_dir": str(folder)})
        before = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
        trainer.fit(parts.module, datamodule=parts.datamodule)
    torch.set_num_threads(1)
    noise = ("time/", "perf/", "tok/s")
    module = parts.module
    return {
        "weights": {name: fingerprint(part) for name, part in module.named_children() if name != "reference"},
        "parameters": [list(p.shape) for p in module.parameters()],
        "metrics": {k: v.item() for k, v in trainer.callback_metrics.items() if not k.startswith(noise)},
        "before": before,
        "shapes": shapes,
        "model": module.actor.lm.config.to_dict(),
        "checkpointing": module.actor.lm.is_gradient_checkpointing,
        "vocabulary": parts.loaded.tokenizer.get_vocab(),
        "trained": [(prompt.text, sorted(prompt.row)) for prompt in parts.datamodule.train_prompts],
        "held out": [(prompt.text, prompt.row["answer"]) for prompt in parts.datamodule.validation_prompts],
        "evaluations": len(parts.datamodule.val_dataloader()),
        "template": parts.datamodule._encoder.chat_template_kwargs,
        "reward": {
            name: (term.weight, getattr(term.reward, "__dict__", {})) for name, term in module.reward.terms.items()
        },
        "threads": used,
    }


SIMULATED = [key for key in BUILT if key.startswith("callbacks.") and "checkpoint" not in key]
BESIDE = {
    "callbacks.kl_early_stop.patience": ["callbacks.kl_early_stop.target=0.001"],
}
"""Further settings without which a key has no effect in a simulated run."""


@pytest.fixture(scope="module")
def scored() -> Any:
    """Experience of one small rollout, for all simulated runs."""
    recorder = Recorder()
    fit(tiny_module(iterations=1, update={"epochs": 1, "minibatch_size": 16}), [recorder])
    return recorder.of("on_experience_ready")[0][0]


@pytest.mark.parametrize("key", SIMULATED)
def test_what_a_callback_does_changes(compose, tmp_path, monkeypatch, scored, key):
    """In a simulated run; a value that is stored and read by nothing changes nothing."""
    seen = []
    for name, changes in zip(("before", "after"), overrides(key, BUILT), strict=True):
        config = schema.check(compose("logger=none", *BESIDE.get(key, []), *changes))
        (tmp_path / name).mkdir()
        callback = make(schema.get(config, key.rpartition(".")[0]))
        seen.append(behaviour(callback, scored, tmp_path / name, monkeypatch))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("key", [key for key in BUILT if key not in SIMULATED])
def test_what_is_built_changes_and_is_read(compose, tmp_path, fresh_store, key):
    block = key.rpartition(".")[0]
    if block == "logger.mlflow":
        (tmp_path / "mlflow").mkdir()
        shutil.copy(fresh_store, tmp_path / "mlflow")
    seen = []
    for changes in overrides(key, BUILT):
        config = schema.check(compose(*changes, *(["logger=none"] if block == "trainer" else [])))
        built = make_trainer(config) if block == "trainer" else make(schema.get(config, block))
        seen.append(dict(visible(built)))
    changed = {path for path in seen[0].keys() | seen[1].keys() if seen[0].get(path) != seen[1].get(path)}
    assert changed
    read = names_read()
    assert block == "trainer" or any(path.rpartition(".")[2] in read for path in changed), f"nothing reads {changed}"


def visible(thing: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The state of an object by attribute, those of its parts included, without addresses and random names."""
    for name, value in vars(thing).items():
        if name in ("_key", "_mlflow_client", "_courier", "_log", "_files", "trainer", "_trainer"):
            continue
        if hasattr(value, "__dict__") and type(value).__module__.startswith("lightning"):
            yield from visible(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=repr))


@functools.cache
def names_read() -> frozenset[str]:
    """Attributes of ``self`` that checkpoints and loggers of the package read outside of ``__init__``."""
    found: set[str] = set()
    for module in ("checkpoint", "reporting"):
        for path in [*(PACKAGE / module).rglob("*.py"), *PACKAGE.glob(f"{module}*.py")]:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            built = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
            skipped = {node for function in built for node in ast.walk(function)}
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in skipped
            }
    return frozenset(found)


def test_a_key_that_is_only_stored_is_seen(tmp_path):
    assert "unheard_of" not in names_read() and "every_n_iterations" in names_read()


def test_output_folder_run_name_and_cache_folder(compose, tmp_path):
    config = schema.check(compose("run_name=mine", f"warmup.cache_dir={tmp_path}/cache", *BASE[1:]))
    assert config["logger"]["mlflow"]["run_name"] == "mine"
    assert make_trainer(config | {"logger": None}).default_root_dir == str(tmp_path)
    assemble(config)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]


def test_deterministic_algorithms(compose):
    try:
        for wanted in (True, False):
            make_trainer(schema.check(compose("logger=none", f"trainer.deterministic={wanted}")))
            assert torch.are_deterministic_algorithms_enabled() == wanted
    finally:
        torch.use_deterministic_algorithms(False)
