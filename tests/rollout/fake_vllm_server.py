"""A small HTTP server with the end points of a vLLM server, for failures that a real one does not produce on demand.

Responses are a function of the seed alone, so lost, doubled or swapped results are detected. Weights are really fetched
from the trainer, by the code that runs in vLLM's workers.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from torch import Tensor

from lightning_rlhf.rollout.vllm_worker import fetch

Answer = tuple[int, dict[str, Any]]
Fault = Callable[["FakeVLLMServer", dict[str, Any]], Answer | None]
"""Given the server and the body of a request for tokens: another answer, or None for the right one."""


def response_to(seed: int, limit: int, vocabulary: int = 50) -> list[int]:
    """The tokens of a row: length and ids follow from its seed."""
    return [2 + (seed >> (5 * i)) % (vocabulary - 2) for i in range(1 + seed % limit)]


class FakeVLLMServer:
    def __init__(self, *, port: int = 0, fault: Fault | None = None, token: str | None = None, **facts: Any) -> None:
        self.facts = {"model": "fake", "vocabulary": 50, "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
        self.facts |= {"dtype": "float32", "quantization": None}
        self.facts |= facts
        self.fault = fault
        self.label = "default"
        self.held = ""
        self.weights: dict[str, Tensor] = {}
        self.received: list[int] = []
        """Bytes of every transfer."""
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.sampled_with: list[str] = []
        self.previous: dict[str, Any] | None = None
        self.lock, self.receiving = Lock(), Lock()
        self._connections: set[socket.socket] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                fake._connections.add(self.request)
                super().setup()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or "{}")
                if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                    status, answer = 401, {"error": {"message": "this server asks for its token"}}
                else:
                    status, answer = fake.answer(self.path, body)
                payload = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # connections that the trainer or the test broke off

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def kill(self) -> None:
        """Close every connection and stop listening, as after SIGKILL."""
        Thread(target=self._server.shutdown, daemon=True).start()  # it waits for the loop, which may have called this
        self._server.socket.close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/inference/v1/generate":
            return self._generate(body)
        with self.lock:
            self.calls.append(body.get("method", path.partition("?")[0]))
        if path == "/collective_rpc":
            return 200, {"results": [getattr(self, body["method"])(**body["kwargs"])]}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        return 200, {"success": True}

    def rlhf_describe(self) -> dict[str, Any]:
        return self.facts

    def rlhf_held(self) -> dict[str, Any]:
        return {"label": self.held}

    def rlhf_receive(self, source: str, token: str, label: str) -> dict[str, Any]:
        with self.receiving:  # vLLM's workers do one thing at a time
            if label == self.held:
                return {"label": label, "parameters": 0}
            self.held, self.label = "", "a mixture"
            try:
                self.weights = {name: tensor.clone() for name, tensor in fetch(source, token, label)}
            except (OSError, ValueError) as error:
                return {"error": f"{type(error).__name__}: {error}"}
            self.held = label
            self.received.append(sum(tensor.nbytes for tensor in self.weights.values()))
            self.weights_changed()
        return {"label": label, "parameters": len(self.weights)}

    def weights_changed(self) -> None:
        """For fakes that compute with them."""

    def _generate(self, body: dict[str, Any]) -> Answer:
        with self.lock:
            self.calls.append("generate")
            self.requests.append(body)
        unusual = self.fault(self, body) if self.fault else None
        answer = unusual or (200, self.right_answer(body))
        with self.lock:
            self.previous = answer[1]
        return answer

    def right_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        ids = response_to(sampling["seed"], sampling["max_tokens"], self.facts["vocabulary"])
        content = [{"token_id": i, "logprob": -i / 64} for i in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "length" if len(ids) == sampling["max_tokens"] else "stop",
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        self.sampled_with.append(self.label)
        return {"request_id": f"generate-tokens-{body['request_id']}", "choices": [choice]}


# --- faults ----------------------------------------------------------------------------------------------------------


def dies_at(request: int) -> Fault:
    """Dies with all running requests when it gets its n-th request, counted from 1."""

    def fault(server: FakeVLLMServer, body: dict[str, Any]) -> Answer | None:
        if len(server.requests) >= request:
            server.kill()
        return None

    return fault


def slow(seconds: float) -> Fault:
    def fault(server: FakeVLLMServer, body: dict[str, Any]) -> Answer | None:
        time.sleep(seconds)
        return None

    return fault


def once(fault: Fault) -> Fault:
    """Only the first request fails so."""
    left = [fault]

    def only_once(server: FakeVLLMServer, body: dict[str, Any]) -> Answer | None:
        with server.lock:
            now = left.pop() if left else None
        return now(server, body) if now else None

    return only_once


def changed(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """The right answer with something changed in it."""

    def fault(server: FakeVLLMServer, body: dict[str, Any]) -> Answer | None:
        answer = server.right_answer(body)
        change(answer)
        return 200, answer

    return fault
