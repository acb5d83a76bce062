"""An exported folder is used by others: in a fresh process, in batches, by other users, after the base model moved."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from lightning_rlhf import cli
from lightning_rlhf.models import build_policy, build_tiny
from lightning_rlhf.models.saving import exported_generation_config
from tests.support import VOCABULARY

PROMPTS = ["7+8=", "123+456=", "5="]

ASK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompts = sys.argv[1], sys.argv[2:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
def answers(prompts):
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=6)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
print(json.dumps([answers(prompts), [answers([prompt])[0] for prompt in prompts]]))
"""


def ask(folder: Path) -> tuple[list[str], list[str]]:
    """Greedy answers to all prompts in one batch, and to each alone, from a process that knows transformers only."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), *PROMPTS], capture_output=True, text=True, check=True
    )
    assert "pad_token_id" not in done.stderr and "right-padding" not in done.stderr, done.stderr
    batch, single = json.loads(done.stdout.splitlines()[-1])
    return batch, single


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def umask():
    """A umask under which the group may read and nobody else."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("adapt", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "LoRA"])
def test_a_run_on_a_model_that_moved_is_exported_and_answers_alike_alone_and_in_a_batch(
    tmp_path, monkeypatch, capsys, tiny_run, umask, adapt
):
    if adapt:
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    base = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2, max_positions=64, tie_embeddings=True)
    for name, weight in base.lm.named_parameters():
        if "layers" in name and weight.ndim == 2:
            weight.data *= 10  # so that the generated tokens depend on the whole prompt, and on wrong padding
    base.lm.save_pretrained("base")
    base.tokenizer.save_pretrained("base")
    wrong = {"do_sample": False, "temperature": 0.9, "eos_token_id": 1}
    Path("base/generation_config.json").write_text(json.dumps(wrong), encoding="utf-8")
    model = ["model=hf_lora" if adapt else "model=hf", "model.source.path=./base", "model.source.chat_template=null"]
    run = ["hydra.run.dir=run", "logger=none", *tiny_run, *model, "data.validation.size=2", "rollout.max_new_tokens=8"]
    assert cli.main(["train", *run]) == 0
    Path("base").rename("moved")
    capsys.readouterr()

    assert cli.main(["export", "checkpoint=run", "output=out"]) == 2
    error = capsys.readouterr().err
    assert "no such file or folder" in error and "model.source.path=FOLDER" in error
    assert not Path("out").exists()
    assert cli.main(["export", "checkpoint=run", "output=out", "model.source.path=./moved"]) == 0

    batch, single = ask(tmp_path / "out")
    assert batch == single
    assert len(set(batch)) > 1, "answers differ from prompt to prompt"
    assert modes(tmp_path / "out") == {0o640}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == ("left", "<pad>", "<eos>")
    generation = GenerationConfig.from_pretrained("out")
    generation.validate(strict=True)
    assert (generation.do_sample, generation.eos_token_id, generation.pad_token_id) == (False, 1, 0)


@pytest.mark.parametrize("relative", [True, False], ids=["relative path", "absolute path"])
def test_a_project_that_moved_is_exported_from_another_folder(tmp_path, monkeypatch, tiny_run, relative):
    """As by eval and resume: a model path relative to the run's first working directory, or moved with the run."""
    project = tmp_path / "project"
    loaded = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2, max_positions=64)
    loaded.lm.save_pretrained(project / "base")
    loaded.tokenizer.save_pretrained(project / "base")
    monkeypatch.chdir(project)
    model = ["model=hf", f"model.source.path={'base' if relative else project / 'base'}"]
    run = ["hydra.run.dir=runs/one", "logger=none", *tiny_run, *model, "model.source.chat_template=null"]
    assert cli.main(["train", *run, "data.validation=null", "rollout.max_new_tokens=4"]) == 0
    project.rename(tmp_path / "elsewhere")
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")

    assert cli.main(["export", "checkpoint=../elsewhere/runs/one", "output=out"]) == 0
    assert Path("out/model.safetensors").is_file()
    before = Path("out/model.safetensors").read_bytes()
    Path("link").symlink_to("full")
    Path("full").mkdir()
    assert cli.main(["export", "checkpoint=../elsewhere/runs/one", "output=link"]) == 0
    assert Path("link").is_symlink() and Path("full/model.safetensors").read_bytes() == before
    assert cli.main(["export", "checkpoint=../elsewhere/runs/one", "output=out"]) == 2
    assert cli.main(["export", "checkpoint=../elsewhere/runs/one", "output=out", "force=true"]) == 0
    assert Path("out/model.safetensors").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["full", "link", "out"], "nothing hidden is left"
    base = tmp_path / "elsewhere" / "base"
    assert cli.main(["export", "checkpoint=../elsewhere/runs/one", f"output={base}", "force=true"]) == 2
    assert (base / "model.safetensors").is_file()


MODEL = '{"model_type": "llama"}'
EMPTY, OF_MODEL = (hashlib.sha256(text.encode()).hexdigest() for text in ("", MODEL))
EXPORT = json.dumps({"files": {"config.json": OF_MODEL, "a/model.safetensors": EMPTY}})
OURS = {"config.json": MODEL, "lightning_rlhf_export.json": EXPORT, "a/model.safetensors": ""}
KEPT = {
    "anything": ({"thesis.tex": ""}, "holds no lightning_rlhf_export.json"),
    "a model that no export wrote": ({"config.json": MODEL, "model.safetensors": ""}, "holds no lightning_rlhf_export"),
    "a broken record": (OURS | {"lightning_rlhf_export.json": "{"}, "holds no lightning_rlhf_export.json, which an"),
    "notes beside an export": (OURS | {"notes.txt": "mine"}, "holds notes.txt, which no export has written"),
    "notes in an export": (OURS | {"a/notes.txt": "mine"}, "holds a/notes.txt, which no export has written"),
    "a changed file": (OURS | {"config.json": MODEL + " "}, "holds config.json, which was changed since it was"),
    "checkpoints": (OURS | {"checkpoints/latest": ""}, "holds checkpoints/latest"),
    "a repository": (OURS | {".git/HEAD": ""}, "holds .git/HEAD"),
}


@pytest.mark.parametrize(("files", "said"), KEPT.values(), ids=KEPT)
def test_force_replaces_no_folder_that_is_not_an_export(tmp_path, capsys, files, said):
    folder = tmp_path / "precious"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    assert cli.main(["export", f"checkpoint={tmp_path / 'run'}", f"output={folder}", "force=true"]) == 2
    assert said in capsys.readouterr().err
    assert all((folder / name).is_file() for name in files)


@pytest.mark.parametrize("output", [".", "..", "link"])
def test_the_current_folder_and_those_above_it_are_never_replaced(tmp_path, monkeypatch, capsys, output):
    (tmp_path / "config.json").write_text(MODEL, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "link").symlink_to(here)
    place = tmp_path / "link" if output == "link" else output
    assert cli.main(["export", f"checkpoint={tmp_path / 'run'}", f"output={place}", "force=true"]) == 2
    assert "is the current folder or lies above it" in capsys.readouterr().err
    assert here.is_dir()


def test_other_keys_than_those_of_the_model_are_refused(tmp_path, capsys):
    assert cli.main(["export", f"checkpoint={tmp_path}", f"output={tmp_path / 'out'}", "seed=1"]) == 2
    assert "keys of the model, such as model.source.path=, not 'seed=1'" in capsys.readouterr().err


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "sampling that is on": ({"do_sample": True, "temperature": 0.9}, {"do_sample": True, "temperature": 0.9}, []),
    "sampling that is off": (
        {"do_sample": False, "temperature": 0.9, "top_k": 20},
        {"do_sample": False},
        ["temperature = 0.9", "top_k = 20"],
    ),
    "beams that are off": ({"length_penalty": 2.0}, {}, ["length_penalty = 2.0"]),
    "beams that are on": ({"num_beams": 2, "length_penalty": 2.0}, {"num_beams": 2, "length_penalty": 2.0}, []),
    "nothing that works": (
        {"num_return_sequences": 3, "top_p": 0.5},
        {},
        ["top_p = 0.5", "left out, but for its tokens"],
    ),
}


@pytest.mark.parametrize(("found", "kept", "said"), CONFIGS.values(), ids=CONFIGS)
def test_a_generation_config_that_cannot_be_saved_loses_what_has_no_effect(tmp_path, caplog, found, kept, said):
    loaded = build_tiny("0123456789", hidden_size=32, layers=1, heads=2)
    loaded.lm.generation_config = GenerationConfig(eos_token_id=[1, 5])
    for name, value in found.items():
        setattr(loaded.lm.generation_config, name, value)
    loaded.tokenizer.padding_side = "right"
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        build_policy(loaded, critic="none", reference="none").actor.save_pretrained(tmp_path, loaded.tokenizer)
    written = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    written.pop("transformers_version")
    assert {name: value for name, value in written.items() if value is not None and name[0] != "_"} == {
        "eos_token_id": [1, 5], "pad_token_id": 0, **kept,
    }  # fmt: skip
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_rlhf")]
    assert len(messages) == len(said)
    assert all(word in text for word, text in zip(said, messages, strict=True))
    assert loaded.tokenizer.padding_side == "right"


def test_end_and_padding_tokens_are_named_where_the_model_names_none():
    loaded = build_tiny("0123456789", hidden_size=32, layers=1, heads=2)
    loaded.lm.generation_config = GenerationConfig()
    config = exported_generation_config(loaded.lm, loaded.tokenizer)
    assert config is not None
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)
