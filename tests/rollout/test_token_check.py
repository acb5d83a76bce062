"""Access to a vLLM server, allowed sources of weights, and where the token is read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.rollout import token_check
from lightning_rlhf.rollout.server_client import Server, ServerMismatch
from lightning_rlhf.rollout.token_check import TokenCheck, TokenError, agreed, agreed_source, is_loopback, read_token
from lightning_rlhf.rollout.vllm_worker import WeightReceiver
from lightning_rlhf.rollout.weight_offer import WeightStore
from tests.rollout.fake_vllm_server import FakeVLLMServer

SECRET = "not-a-guess-0123456789"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in (token_check.TOKEN, token_check.TOKEN_FILE, token_check.WEIGHTS_FROM):
        monkeypatch.delenv(name, raising=False)


def scope(path: str = "/collective_rpc", method: str = "POST", kind: str = "http", **headers: Any) -> dict[str, Any]:
    """A request as uvicorn describes it; ``headers`` by name, several values as a list."""
    named = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(n, v) for n, values in named.items() for v in (values if isinstance(values, list) else [values])]
    request: dict[str, Any] = {"type": kind, "path": path, "root_path": "", "server": ("127.0.0.1", 8000)}
    request["headers"] = [(n.encode(), v.encode("latin-1")) for n, v in pairs if v is not None]
    return request | ({"method": method} if kind == "http" else {})


def knock(request: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The answer of the middleware itself; ``None`` if it passes the request on."""
    sent: list[dict[str, Any]] = []
    passed: list[str] = []

    async def app(inner: Any, receive: Any, send: Any) -> None:
        passed.append(inner["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the door reads no body")

    asyncio.run(TokenCheck(app)(request, receive, send))
    assert bool(passed) != bool(sent)
    return None if passed else sent


# --- with a token ----------------------------------------------------------------------------------------------------


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv(token_check.TOKEN, SECRET)
    return f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("path", "method"),
    [
        *(("/collective_rpc", method) for method in ("POST", "GET", "HEAD", "OPTIONS", "PUT", "BREW")),
        *(("/health", method) for method in ("POST", "OPTIONS", "DELETE")),
        *(
            (path, "GET")
            for path in ("/", "", "//health", "/health/", "/healthz", "/metrics", "/ping", "/no/such/path")
        ),
        *((path, "GET") for path in ("/health/../collective_rpc", "/HEALTH", "/v1/models", "/health?x", "/health%2f")),
    ],
)
def test_every_path_asks_for_the_token(token, path, method):
    [start, body] = knock(scope(path, method)) or [{}, {}]
    assert start["status"] == 401 and (b"www-authenticate", b"Bearer") in start["headers"]
    assert "asks for its token" in json.loads(body["body"])["error"]["message"] and SECRET not in str([start, body])
    assert knock(scope(path, method, authorization=token)) is None


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}x", f"Basic {SECRET}", SECRET),
        *(f"Bearer {SECRET.upper()}", f"Bearer {SECRET} {SECRET}", "Bearer é", f"Bearer {SECRET}\x00"),
        [f"Bearer {SECRET}", "Bearer another"],
    ],
)
def test_a_wrong_token_is_refused(token, header):
    assert knock(scope(authorization=header))[0]["status"] == 401


def test_health_is_open_and_so_is_it_under_a_root_path(token):
    assert knock(scope("/health", "GET")) is None and knock(scope("/health", "HEAD")) is None
    assert knock(scope("/x/health", "GET") | {"root_path": "/x"}) is None
    assert knock(scope("/x/health", "GET"))[0]["status"] == 401
    assert knock(scope("/x/collective_rpc") | {"root_path": "/x"})[0]["status"] == 401


def test_websockets_are_closed_before_they_open(token):
    [closed] = knock(scope("/v1/realtime", kind="websocket"))
    assert closed["type"] == "websocket.close" and closed["code"] == 1008
    answered = knock(scope("/v1/realtime", kind="websocket") | {"extensions": {"websocket.http.response": {}}})
    assert answered[0] == answered[0] | {"type": "websocket.http.response.start", "status": 401}
    assert knock(scope("/v1/realtime", kind="websocket", authorization=token)) is None
    assert knock({"type": "lifespan"}) is None


def test_a_server_with_an_unusable_token_does_not_start(monkeypatch):
    monkeypatch.setenv(token_check.TOKEN, "")
    with pytest.raises(TokenError, match=f"{token_check.TOKEN} holds no token"):
        TokenCheck(lambda *_: None)  # type: ignore[arg-type]


# --- without one -----------------------------------------------------------------------------------------------------


def test_without_a_token_only_programs_of_this_machine_are_answered():
    assert (
        knock(scope()) is None and knock(scope(host="localhost:8000")) is None and knock(scope(host="[::1]:80")) is None
    )
    assert knock(scope(host="rebound.example:8000"))[0]["status"] == 403, "a name that leads to 127.0.0.1"
    assert knock(scope(origin="http://a.page"))[0]["status"] == 403, "a web page in a browser of this machine"
    assert knock(scope() | {"server": ("10.0.0.5", 8000)})[0]["status"] == 403, "listens where others come"
    assert knock(scope() | {"server": None})[0]["status"] == 403
    assert knock(scope() | {"server": ("/run/vllm.sock", None)}) is None
    assert knock(scope("/health", "GET", origin="http://a.page")) is None


# --- where the token is read -----------------------------------------------------------------------------------------


def test_the_token_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_token(None, {}) is None
    assert read_token(None, {token_check.TOKEN: SECRET}) == SECRET
    assert read_token(str(file), {token_check.TOKEN: "another-0123456789"}) == SECRET
    assert read_token(None, {token_check.TOKEN_FILE: str(file)}) == SECRET
    with pytest.raises(TokenError, match="are both set"):
        read_token(None, {token_check.TOKEN: SECRET, token_check.TOKEN_FILE: str(file)})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o620])
def test_a_file_that_others_can_reach_is_refused(tmp_path, mode):
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(TokenError, match=f"has mode {mode:04o}.*chmod 600 {file}") as refused:
        read_token(str(file))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("content", ["", "short", "two words that are long", "ümlaute-0123456789", "a\nb" * 20])
def test_an_invalid_token_is_reported_without_showing_it(tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(TokenError, match="at least 16 printable ASCII characters") as refused:
        read_token(str(file))
    assert not content or content not in str(refused.value)
    with pytest.raises(TokenError, match="no-such-file cannot be read"):
        read_token(str(tmp_path / "no-such-file"))


# --- where weights come from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "source"),
    [
        (None, "http://10.0.0.1:7000"),
        (None, "http://127.0.0.1@10.0.0.1:7000"),
        (None, "http://127.0.0.1.evil.example:7000"),
        (None, "https://127.0.0.1:7000"),
        (None, "file:///etc/passwd"),
        (None, "http://127.0.0.1"),
        ("10.0.0.1:7000", "http://10.0.0.1:7001"),
        ("10.0.0.1", "http://127.0.0.1:7000"),
        ("trainer", "http://trainer2:7000"),
    ],
)
def test_weights_are_fetched_from_the_agreed_address_only(monkeypatch, own, source):
    if own:
        monkeypatch.setenv(token_check.WEIGHTS_FROM, own)
    with pytest.raises(ValueError, match="weights are not fetched from"):
        agreed_source(source)
    worker = WeightReceiver()
    worker.rlhf_label = "those it has"
    assert "weights are not fetched from" in worker.rlhf_receive(source, "t", "new")["error"]
    assert worker.rlhf_label == "those it has", "nothing was touched"


def test_the_agreed_address_with_and_without_a_port():
    assert agreed_source("http://localhost:7000", {}) == ("localhost", 7000)
    assert agreed_source("http://trainer:7000", {token_check.WEIGHTS_FROM: "trainer"}) == ("trainer", 7000)
    assert agreed_source("http://trainer:7000/", {token_check.WEIGHTS_FROM: "Trainer:7000"}) == ("trainer", 7000)
    assert agreed("[fe80::1]:70") == ("fe80::1", 70)
    for wrong in ("", "a:b", "http://trainer", "trainer/x", "me@trainer", "trainer:99999"):
        with pytest.raises(ValueError, match="host or host:port"):
            agreed(wrong)


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "", None)))


# --- the trainer -----------------------------------------------------------------------------------------------------


def test_the_trainer_shows_its_token_and_says_where_it_is_given_fake_server():
    server = FakeVLLMServer(token=SECRET)
    try:
        assert Server(server.url, request_timeout=5, token=SECRET).describe()["model"] == "fake"
        for wrong in (None, "another-0123456789"):
            with pytest.raises(ServerMismatch, match=r"answered 401: .*rollout.token_file.*LIGHTNING_RLHF_TOKEN"):
                Server(server.url, request_timeout=5, token=wrong).describe()
    finally:
        server.kill()


def test_a_server_on_another_machine_needs_a_token():
    Server("http://gpu1:8000", request_timeout=5, token=SECRET)
    Server("http://localhost:8000", request_timeout=5)
    with pytest.raises(ValueError, match="'http://gpu1:8000', which is not allowed without a token"):
        Server("http://gpu1:8000", request_timeout=5)


def test_the_token_is_in_nothing_that_is_written(tmp_path: Path, llama, make_tokenizer):
    from lightning_rlhf.rollout import VLLMServerEngine

    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    server = FakeVLLMServer(token=SECRET)
    engine = VLLMServerEngine([server.url], token_file=str(file), retry_seconds=0.02)
    try:
        engine.setup(llama, make_tokenizer())
        assert engine.describe()["authenticated"] and SECRET not in str(engine.describe())
        assert engine._store.token not in str(engine.describe())
    finally:
        engine.close()
        server.kill()


def test_the_store_does_not_listen_everywhere():
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="every address"):
            WeightStore(host)
