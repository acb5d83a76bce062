"""A precision that the device lacks: replaced or refused by one key, on a CPU restricted to AVX2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf import cli, precision, schema
from lightning_rlhf.accelerators import device

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Environment in which oneDNN and PyTorch use only instructions that a CPU with AVX2 has."""

TINY = [
    *("iterations=1", "threads=1", "warmup=none", "logger=none", "trainer.enable_progress_bar=false"),
    *("data.prompts_per_iteration=4", "module.update.minibatch_size=4", "module.update.epochs=1"),
    *("model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "data.validation.size=4"),
]


def on_avx2(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | AVX2, capture_output=True, text=True, timeout=300
    )


FIT = """
import json, sys, torch
from lightning_rlhf import precision, schema
config, replaced = precision.fit(json.loads(sys.argv[1]))
try:
    refused = str(precision.fit(json.loads(sys.argv[1]) | {"unsupported_precision": "refuse"}))
except schema.ConfigError as error:
    refused = [problem.key for problem in error.problems]
print(json.dumps({
    "supported": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "config": config,
    "notes": [str(each) for each in replaced],
    "refused": refused,
}))
"""

LOW = {
    "trainer": {"accelerator": "cpu", "precision": "bf16-mixed"},
    "model": {"source": {"dtype": "bfloat16"}},
    "rollout": {"dtype": "bfloat16"},
    "reward": {"terms": {"judge": {"reward": {"dtype": "float16", "path": "x"}}}},
}


def test_every_low_precision_is_replaced_or_refused_without_its_arithmetic(tmp_path):
    done = on_avx2(["-c", FIT, json.dumps(LOW)], tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["supported"] is False
    keys = ["trainer.precision", "model.source.dtype", "rollout.dtype", "reward.terms.judge.reward.dtype"]
    assert [schema.get(seen["config"], key) for key in keys] == ["32-true", "float32", "float32", "float32"]
    assert [note.partition(" ")[0] for note in seen["notes"]] == keys
    assert "bf16-mixed became 32-true: this CPU has no bfloat16 arithmetic" in seen["notes"][0]
    assert seen["refused"] == keys


def test_a_run_and_its_evaluation_report_the_replacement_once_and_compute_in_float32(tmp_path):
    command = ["-m", "lightning_rlhf.cli"]
    run = on_avx2([*command, "train", *TINY, "trainer=bf16", f"hydra.run.dir={tmp_path}/run"], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("trainer.precision = bf16-mixed became 32-true") == 1
    evaluated = on_avx2(
        [*command, "eval", f"checkpoint={tmp_path}/run", "trainer.precision=bf16-mixed", "trainer.accelerator=cpu"],
        tmp_path,
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.count("trainer.precision = bf16-mixed became 32-true") == 1


def test_a_run_that_must_not_replace_ends_before_training(tmp_path):
    words = ["trainer=bf16", "unsupported_precision=refuse", f"hydra.run.dir={tmp_path}/run"]
    run = on_avx2(["-m", "lightning_rlhf.cli", "train", *TINY, *words], tmp_path)
    assert run.returncode == 2
    assert "trainer.precision = 'bf16-mixed'" in run.stderr
    assert "32-true, as this machine (cpu) has no bfloat16 arithmetic" in run.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_server_uses_a_dtype_that_its_machine_computes_in(monkeypatch, capsys):
    from lightning_rlhf import serve

    monkeypatch.setattr(device, "computes_in", lambda place, dtype: dtype is torch.float32)
    config = {"model": {"source": {"dtype": "bfloat16"}}}
    assert serve._dtype(config, "") == serve._dtype(config, "float16") == "float32"
    assert "model.source.dtype = bfloat16 became float32" in capsys.readouterr().err
    with pytest.raises(schema.ConfigError, match="float16"):
        serve._dtype(config | {"unsupported_precision": "refuse"}, "float16")


@pytest.mark.parametrize(
    ("given", "has", "used"),
    [
        ("bf16-mixed", {torch.bfloat16}, "bf16-mixed"),
        ("bf16-true", set(), "32-true"),
        ("16-mixed", {torch.bfloat16}, "bf16-mixed"),
        ("16-mixed", set(), "32-true"),
        ("16-mixed", {torch.float16}, "32-true"),
        ("16-true", {torch.bfloat16}, "32-true"),
        ("16-true", {torch.float16}, "16-true"),
        ("32-true", set(), "32-true"),
        ("64-true", set(), "64-true"),
    ],
)
def test_replacements_of_the_trainers_precision_on_a_cpu(monkeypatch, given, has, used):
    monkeypatch.setattr(device, "computes_in", lambda place, dtype: dtype in has)
    before = {"trainer": {"accelerator": "cpu", "precision": given}}
    after, replaced = precision.fit(before)
    assert after["trainer"]["precision"] == used
    assert before["trainer"]["precision"] == given
    assert bool(replaced) == (given != used)


def test_a_device_with_the_arithmetic_keeps_the_configured_precision(monkeypatch):
    monkeypatch.setattr(device, "computes_in", lambda place, dtype: True)
    assert precision.fit(LOW) == (LOW, [])


def test_dtypes_for_storage_only_are_not_replaced(monkeypatch):
    monkeypatch.setattr(device, "computes_in", lambda place, dtype: False)
    stored = {"trainer": {"precision": "32-true"}, "module": {"rollout_correction": {"rollout_is_dtype": "float16"}}}
    assert precision.fit(stored) == (stored, [])


def test_the_value_of_unsupported_precision_is_checked(capsys):
    assert cli.main(["train", "unsupported_precision=maybe"]) == 2
    assert "replace or refuse" in capsys.readouterr().err
