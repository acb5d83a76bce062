"""The vLLM command that ``lightning-rlhf serve`` runs."""

from __future__ import annotations

import os
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from lightning_rlhf import cli, schema, serve
from lightning_rlhf.accelerators import device
from lightning_rlhf.models import build_tiny
from lightning_rlhf.rollout import token_check

SECRET = "not-a-guess-0123456789"


@pytest.fixture
def executed(monkeypatch, tmp_path) -> list[tuple[list[str], dict[str, str]]]:
    """The program that would replace this process: arguments and environment."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: calls.append((arguments, environment)))
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (token_check.TOKEN, token_check.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    return calls


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_server_matches_the_run(executed, capsys, monkeypatch):
    monkeypatch.setenv(token_check.TOKEN, SECRET)
    words = ["port=8123", "host=0.0.0.0", "enforce_eager=true", "seed=5", "rollout.max_new_tokens=9"]
    assert cli.main(["serve", *words, "data.max_prompt_tokens=11", "--", "--max-num-seqs", "7"]) == 0
    [(arguments, environment)] = executed
    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    expected = {
        **{"--host": "0.0.0.0", "--port": "8123", "--dtype": "float32", "--max-model-len": "20", "--seed": "5"},
        **{"--tensor-parallel-size": "1", "--load-format": "dummy", "--logprobs-mode": "processed_logprobs"},
        **{"--generation-config": "vllm", "--worker-extension-cls": serve.EXTENSION, "--max-num-seqs": "7"},
    }
    assert {name: option(arguments, name) for name in expected} == expected
    assert "--enable-scale-out" in arguments and "--enforce-eager" in arguments
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment[token_check.WEIGHTS_FROM] == "127.0.0.1"
    assert environment[token_check.TOKEN] == SECRET and SECRET not in str(arguments)
    printed = capsys.readouterr().out
    assert "VLLM_SERVER_DEV_MODE=1" in printed and SECRET not in printed
    assert arguments[-2:] == ["--middleware", token_check.MIDDLEWARE], "the last one is the outermost"
    folder = option(arguments, "--model")
    assert AutoConfig.from_pretrained(folder).architectures == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids == [3, 12, 4, 15]


def test_the_extension_that_is_named_exists():
    from lightning_rlhf.schema.locate import locate

    assert {"rlhf_describe", "rlhf_receive"} <= set(dir(locate(serve.EXTENSION)))


def test_a_folder_is_served_as_it_is_and_other_options_reach_vllm(executed, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "computes_in", lambda place, dtype: True)
    tiny = build_tiny("0123456789+-*= ", hidden_size=32, layers=1, heads=2)
    tiny.lm.save_pretrained(tmp_path / "model")
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    model = ["model=hf", f"model.source.path={tmp_path / 'model'}", "model.source.trust_remote_code=true"]
    more = ["dtype=bfloat16", "max_model_len=33", "tensor_parallel_size=2", "gpu_memory_utilization=0.5"]
    assert cli.main(["serve", *model, *more]) == 0
    [(arguments, _)] = executed
    assert option(arguments, "--model") == str(tmp_path / "model")
    assert option(arguments, "--dtype") == "bfloat16" and option(arguments, "--max-model-len") == "33"
    assert option(arguments, "--tensor-parallel-size") == "2"
    assert option(arguments, "--gpu-memory-utilization") == "0.5"
    assert "--trust-remote-code" in arguments and "--enforce-eager" not in arguments


def test_models_with_the_same_outline_share_a_folder(tmp_path):
    def outline(**changes: Any) -> str:
        return serve.export_outline(build_tiny("0123456789", **({"hidden_size": 32, "heads": 2} | changes)), tmp_path)

    assert outline(seed=1) == outline(seed=2) != outline(hidden_size=16)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("host=0.0.0.0", "host = '0.0.0.0' is not allowed without a token"),
        ("host=gpu1", "host = 'gpu1' is not allowed without a token"),
        ("token_file=/no/such/file", "the token file /no/such/file cannot be read"),
        ("weights_from=http://a:1", "weights_from = 'http://a:1' is not allowed: host or host:port"),
        ("port=http", "port = 'http' is not allowed"),
        ("tensor_parallel_size=0", "tensor_parallel_size = '0' is not allowed"),
        ("enforce_eager=yes", "enforce_eager = 'yes' is not allowed: true or false"),
        ("rollout.max_new_token=3", "did you mean rollout.max_new_tokens"),
        ("--port", "arguments are written key=value"),
    ],
)
def test_bad_input_is_reported_on_one_screen(executed, capsys, word, message):
    assert cli.main(["serve", word]) == 2
    assert message in capsys.readouterr().err and not executed


def test_without_vllm_it_says_what_to_install(executed, monkeypatch, capsys):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve"]) == 2
    assert "pip install lightning-rlhf[vllm]" in capsys.readouterr().err and not executed


def test_token_and_source_of_the_weights_reach_the_server(executed, tmp_path, monkeypatch, capsys):
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    run = ["rollout=vllm_server", "rollout.weights_host=10.0.0.1", "rollout.weights_port=7000"]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "host=0.0.0.0", "token_file=token", *run]) == 0
    assert cli.main(["serve", "host=0.0.0.0", f"rollout.token_file={file}", *run, "weights_from=10.0.0.2"]) == 0
    monkeypatch.setenv(token_check.TOKEN_FILE, str(file))
    assert cli.main(["serve", "host=0.0.0.0"]) == 0
    assert [environment[token_check.TOKEN_FILE] for _, environment in executed] == [str(file)] * 3
    assert [environment[token_check.WEIGHTS_FROM] for _, environment in executed] == [
        *("10.0.0.1:7000", "10.0.0.2", "127.0.0.1")
    ]
    assert SECRET not in capsys.readouterr().out + str([arguments for arguments, _ in executed])
    file.chmod(0o644)
    assert cli.main(["serve"]) == 2
    assert "has mode 0644" in capsys.readouterr().err


def test_the_address_cannot_be_changed_by_options_of_vllm(executed, capsys):
    for word in ("--host=0.0.0.0", "--host", "--api-key", "--api_key=x"):
        assert cli.main(["serve", "--", word, "0.0.0.0"]) == 2
        assert "is not allowed after --" in capsys.readouterr().err
    assert not executed
    assert cli.main(["serve", "--", "--middleware", "mine.Own", "--hos", "0.0.0.0"]) == 0
    [(arguments, _)] = executed
    assert arguments[-4:] == ["--host", "127.0.0.1", "--middleware", token_check.MIDDLEWARE]


def test_the_shipped_configuration_of_the_engine(compose, monkeypatch):
    monkeypatch.setenv(token_check.TOKEN, SECRET)
    from lightning_rlhf.assembly import make
    from lightning_rlhf.rollout import VLLMServerEngine

    config = schema.check(compose("rollout=vllm_server", "rollout.urls=['http://one:1','http://two:2']"))
    engine = make(config["rollout"])
    assert isinstance(engine, VLLMServerEngine)
    assert [member.server.url for member in engine._pool.members] == ["http://one:1", "http://two:2"]
