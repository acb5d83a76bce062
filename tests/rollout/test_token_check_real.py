"""A real vLLM server with a token: every path without the token, and a training with it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.models import build_tiny
from lightning_rlhf.rollout import VLLMServerEngine, token_check
from lightning_rlhf.rollout.server_client import Server
from lightning_rlhf.rollout.weight_offer import WeightStore
from tests.rollout.real_vllm_servers import RealServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

SECRET = "not-a-guess-0123456789"
MODEL = {"hidden_size": 64, "heads": 2, "layers": 1, "max_positions": 64, "seed": 1}
OVERRIDES = [*(f"model.source.{key}={value}" for key, value in MODEL.items()), "rollout.max_new_tokens=8"]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
BY_HAND = (
    *("/metrics", "/docs", "/redoc", "/no/such/path", "/", "//collective_rpc", "/%63ollective_rpc", "/metrics/"),
    *(
        "/health/../collective_rpc",
        "/health%2f..%2fcollective_rpc",
        "/collective_rpc?x=/health",
        "/collective_rpc#/health",
    ),
    *("/collective_rpc;/health", "/health/", "//health", "http://127.0.0.1/collective_rpc", "/v1/realtime"),
)
"""Beside what the server lists itself."""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory, token_file) -> Iterator[RealServer]:
    started = RealServer([f"token_file={token_file}", *OVERRIDES], tmp_path_factory.mktemp("server") / "server.log")
    try:
        started.wait()
        yield started
    finally:
        started.kill()


def ask(server: RealServer, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", **headers}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def held(server: RealServer) -> Any:
    """The label that the workers hold, and the bits of a response from those weights."""
    shown = token_check.bearer(SECRET)
    label = ask(server, "/collective_rpc", "POST", {"method": "rlhf_held"}, **shown)
    sampling = {"temperature": 0.0, "max_tokens": 4, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    status, text = ask(
        server, "/inference/v1/generate", "POST", {"token_ids": [3, 12, 4, 15], "sampling_params": sampling}, **shown
    )
    assert status == 200, text
    [choice] = json.loads(text)["choices"]
    return label, choice["token_ids"], choice["logprobs"]


def test_every_path_answers_401_without_the_token_and_nothing_changes(server):
    before = held(server)
    status, text = ask(server, "/openapi.json", **token_check.bearer(SECRET))
    assert status == 200
    listed = sorted(json.loads(text)["paths"])
    assert {"/collective_rpc", "/pause", "/reset_prefix_cache", "/inference/v1/generate", "/server_info"} <= set(listed)
    answers = {}
    store = WeightStore()
    try:
        store.publish("another", [("lm_head.weight", torch.zeros(3))])
        receive = {"source": store.url, "token": store.token, "label": "another"}
        body = {"method": "rlhf_receive", "kwargs": receive, "new_version": "another", "prompt": "1+1=", "level": 1}
        guess = token_check.bearer("guess" * 5)
        for path in [*listed, *BY_HAND]:
            for method in METHODS:
                answers[method, path] = ask(server, path, method, body)[0]
                answers[method, f"{path} guessed"] = ask(server, path, method, body, **guess)[0]
    finally:
        store.close()
    health = {"GET /health": 200, "HEAD /health": 405}
    opened = {f"{method} {path}": status for (method, path), status in answers.items() if status != 401}
    assert opened == health | {f"{key} guessed": status for key, status in health.items()}
    print(f"{len(answers)} requests to {len(listed)} listed and {len(BY_HAND)} other paths: 401 but for GET /health")
    assert held(server) == before
    assert ask(server, "/health")[0] == 200


def test_a_websocket_is_not_opened_without_the_token(server):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    for path in ("/v1/realtime", "/collective_rpc", "/health"):
        assert ask(server, path, **upgrade)[0] in (401, 403), path


def test_it_listens_on_loopback_alone(server):
    session = server.process.pid
    inodes = {
        os.readlink(link) for pid in _session(session) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()
    }
    sockets = {inode.removeprefix("socket:[").removesuffix("]") for inode in inodes if inode.startswith("socket:[")}
    listening = [(address, port) for address, port, inode in _listening() if inode in sockets]
    assert ("127.0.0.1", server.port) in listening
    print("listens on", listening)
    assert all(token_check.is_loopback(address) for address, _ in listening), listening


def test_the_token_is_in_no_command_line_and_no_log(server):
    for pid in _session(server.process.pid):
        assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text()
    assert SECRET not in server.log.read_text() and "VLLM_SERVER_DEV_MODE=1" in server.log.read_text()


def test_weights_from_another_address_are_refused_even_with_the_token(server):
    before = held(server)
    client = Server(server.url, request_timeout=30, token=SECRET)
    for source in (
        "http://127.0.0.1.example:7000",
        "http://192.0.2.1:80",
        "http://127.0.0.1@192.0.2.1:80",
        "file:///etc",
    ):
        arguments = {"source": source, "token": "t", "label": "another"}
        [answer] = client._workers("rlhf_receive", arguments, 30)
        assert "weights are not fetched from" in answer["error"]
    assert held(server) == before


def test_a_training_with_the_token(server, token_file, compose, tiny_run, monkeypatch, tmp_path):
    from lightning_rlhf.train import train

    before = held(server)
    metrics = train(
        compose(
            *tiny_run,
            *OVERRIDES,
            "iterations=2",
            "logger=csv",
            "rollout=vllm_server",
            f"rollout.urls=['{server.url}']",
            f"rollout.token_file={token_file}",
            "callbacks.checkpoint.every_n_iterations=1",
        )
    )
    assert metrics["clock/iteration"] == 2 and metrics["rollout/logprob_abs_diff_mean"] < 1e-4
    assert held(server) != before, "the trainer's weights are there"
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".ckpt" for file in written)
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


def test_without_the_token_the_trainer_says_what_is_missing(server, monkeypatch):
    monkeypatch.delenv(token_check.TOKEN, raising=False)
    tiny = build_tiny("0123456789+-*= ", **MODEL)
    engine = VLLMServerEngine([server.url], max_new_tokens=8)
    with pytest.raises(ValueError, match=r"answered 401.*rollout.token_file"):
        engine.setup(tiny.lm, tiny.tokenizer)
    engine.close()


def test_tokens_from_logits_that_are_nan_have_no_log_probability(server, token_file, make_prompts):
    """The last test: NaN in vLLM's cache may reappear later."""
    tiny = build_tiny("0123456789+-*= ", **MODEL)
    engine = VLLMServerEngine([server.url], max_new_tokens=8, token_file=str(token_file))
    with torch.no_grad():
        tiny.lm.get_input_embeddings().weight[2] = float("nan")
    try:
        engine.setup(tiny.lm, tiny.tokenizer)
        engine.update_weights(1)
        rollout = engine.generate(make_prompts([3, 12, 4], [2, 12, 4]), samples=1, max_new_tokens=8, seed=5)
    finally:
        engine.close()
    assert rollout.rollout_logprobs[1][rollout.response_mask[1]].isnan().all()


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def _listening() -> Iterator[tuple[str, int, str]]:
    """Address, port and inode of every TCP socket that listens."""
    for file, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                yield socket.inet_ntop(family, b"".join(words)), int(port, 16), fields[9]
