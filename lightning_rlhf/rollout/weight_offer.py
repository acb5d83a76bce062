"""The trainer's side of a weight transfer by HTTP: a snapshot of the weights, offered in parts."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import safetensors.torch
from torch import Tensor

from lightning_rlhf.rollout.token_check import shows


class WeightStore:
    """Holds the weights of one version and sends them to vLLM servers that present its token.

    It keeps its own copy, so that a server that returns during an update gets the same version as the others. The copy
    lies in host memory, in parts of about ``part_bytes``; a part is the most that sender and receiver hold in addition.

    Args:
        host: address of this machine that the servers can reach; the store listens there.
        port: 0 takes a free one.
        part_bytes: size of a part; a larger tensor is a part of its own.

    Raises:
        OSError: the address cannot be listened on.
        ValueError: ``host`` stands for every address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, part_bytes: int = 256 * 2**20) -> None:
        if host in ("", "0.0.0.0", "::", "*"):
            raise ValueError("it stands for every address, and servers cannot be told to fetch from there")
        self.token = secrets.token_urlsafe(32)
        self.part_bytes = part_bytes
        self.label = ""
        self._parts: list[bytes] = []
        self._digests: list[str] = []
        self._server = _Server((host, port), _Handler)
        self._server.store = self
        self.url = f"http://{host}:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=(0.1,), name="weight-store", daemon=True).start()

    def publish(self, label: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the offered weights by a copy of ``weights``. No transfer may be in progress."""
        self.label = ""
        self._parts = []  # before the new copy is made, so that there is one at a time
        self._parts = [safetensors.torch.save(part) for part in in_parts(weights, self.part_bytes)]
        with ThreadPoolExecutor(max_workers=4) as pool:
            self._digests = list(pool.map(lambda part: hashlib.sha256(part).hexdigest(), self._parts))
        self.label = label

    @property
    def size(self) -> int:
        """Bytes of the copy."""
        return sum(len(part) for part in self._parts)

    def read(self, path: str) -> bytes | None:
        """Content of ``/manifest`` or ``/<label>/<part>``; ``None`` for any other path."""
        if path == "/manifest" and self.label:
            return json.dumps({"label": self.label, "sha256": self._digests}).encode()
        label, _, index = path.removeprefix("/").partition("/")
        if label and label == self.label and index in map(str, range(len(self._parts))):
            return self._parts[int(index)]
        return None

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def in_parts(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors together, up to ``size`` bytes; each tensor is contiguous and shares no memory."""
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > size:
            yield part
            part, held = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        held += tensor.nbytes
    if part:
        yield part


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    store: WeightStore


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120.0  # seconds without a byte, after which a connection is closed
    server: _Server

    def do_GET(self) -> None:
        store = self.server.store
        shown = self.headers.get_all("Authorization", [])
        if len(shown) != 1 or not shows(shown[0].encode("latin-1", "replace"), store.token):
            self._answer(401, b"wrong token")
            return
        payload = store.read(self.path)
        if payload is None:
            self._answer(404, f"no {self.path} here; the weights are {store.label!r}".encode())
        else:
            self._answer(200, payload)

    def _answer(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: one line per part would fill the terminal."""
