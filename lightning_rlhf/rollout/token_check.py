"""Access to a vLLM server: its token, the middleware that requires it, and where weights may be fetched from.

vLLM's ``--api-key`` guards some prefixes of paths; the development end points, which call any method of the workers,
are not among them. vLLM's option for this check, as the last middleware:
``--middleware lightning_rlhf.rollout.token_check.TokenCheck``.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from hmac import compare_digest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIDDLEWARE = f"{__name__}.TokenCheck"
TOKEN = "LIGHTNING_RLHF_TOKEN"
"""Environment variable that holds the token."""
TOKEN_FILE = "LIGHTNING_RLHF_TOKEN_FILE"
"""Environment variable that names the file that holds it."""
WEIGHTS_FROM = "LIGHTNING_RLHF_WEIGHTS_FROM"
"""Environment variable of a server: the only address it fetches weights from, ``host`` or ``host:port``."""
SHORTEST = 16
"""Fewest characters of a token."""
OPEN_PATH = "/health"
"""The health check of load balancers; it reveals and changes nothing."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenError(ValueError):
    """The token cannot be used; the message names its source, never the token."""


def read_token(file: str | None = None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token that servers and trainer share.

    Args:
        file: file that holds nothing else; ``None`` looks into the environment.
        environment: ``LIGHTNING_RLHF_TOKEN_FILE`` names the file, or ``LIGHTNING_RLHF_TOKEN`` holds the token.

    Returns:
        The token; ``None`` if none is given.

    Raises:
        TokenError: the file cannot be read, others can read it, or it holds no token; both variables are set.
    """
    named, given = environment.get(TOKEN_FILE), environment.get(TOKEN)
    if file is None and named is not None and given is not None:
        raise TokenError(f"{TOKEN_FILE} and {TOKEN} are both set; allowed is one of them")
    path = file if file is not None else named
    if path is None:
        return None if given is None else _checked(given, f"the environment variable {TOKEN}")
    return _checked(_content(Path(path).expanduser()), f"the token file {path}")


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise TokenError(
                    f"the token file {path} has mode {stat.S_IMODE(mode):04o}: others can read or replace it; "
                    f"chmod 600 {path}"
                )
            return opened.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(f"the token file {path} cannot be read: {error}") from None


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST or not (token.isascii() and token.isprintable()) or " " in token:
        raise TokenError(
            f"{where} holds no token: allowed are at least {SHORTEST} printable ASCII characters without a space, such "
            "as python -c 'import secrets; print(secrets.token_urlsafe(32))' gives"
        )
    return token


def bearer(token: str | None) -> dict[str, str]:
    """The header of a request with the token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def shows(header: bytes, token: str) -> bool:
    """Whether a header holds the token, compared in constant time."""
    scheme, _, shown = header.partition(b" ")
    return compare_digest(shown.strip(), token.encode()) and scheme.lower() == b"bearer"


def is_loopback(host: str | None) -> bool:
    """Whether an address, or ``localhost``, can be reached from this machine alone."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def agreed(address: str) -> tuple[str, int | None]:
    """Host and port of ``host`` or ``host:port``.

    Raises:
        ValueError: it is neither.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host, port = None, None
    if not host or parts.netloc != address or "@" in address:
        raise ValueError(f"weights_from = {address!r} is not allowed: host or host:port of the training machine")
    return host, port


def agreed_source(source: str, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of ``source``, if it is the address that this server was started with.

    Raises:
        ValueError: it is another address, or none.
    """
    own = environment.get(WEIGHTS_FROM) or "127.0.0.1"
    own_host, own_port = agreed(own)
    wanted = urlsplit(source)
    host, port = wanted.hostname, wanted.port
    same_host = host == own_host or (is_loopback(host) and is_loopback(own_host))
    if wanted.scheme != "http" or not host or port is None or not same_host or own_port not in (None, port):
        raise ValueError(
            f"weights are not fetched from {source!r}: this server was started for weights from {own} "
            f"(serve weights_from=..., or {WEIGHTS_FROM}); rollout.weights_host and rollout.weights_port must be that"
        )
    return host, port


class TokenCheck:
    """ASGI middleware around everything a server answers, unknown paths and websockets too; only ``/health`` is open.

    With a token (see :func:`read_token`), each request must show it as a bearer token. Without one, the server
    speaks only to programs of its own machine: not over another address, and not to a browser, which any web page
    can make send requests to 127.0.0.1.

    Args:
        app: the protected ASGI app.

    Raises:
        TokenError: a token is given and cannot be used. The server does not start then.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._token = read_token()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" or _asks_for_health(scope) else self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await _refuse(scope, send, *refusal)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        if self._token is not None:
            shown = _headers(scope, b"authorization")
            if len(shown) == 1 and shows(shown[0], self._token):
                return None
            return 401, "this server asks for its token: Authorization: Bearer ..."
        address, port = scope.get("server") or (None, 0)
        if port is None:  # a Unix socket, protected by file permissions
            return None
        hosts = [urlsplit(f"//{host.decode('latin-1')}").hostname for host in _headers(scope, b"host")]
        if not is_loopback(address) or not all(map(is_loopback, hosts)) or _headers(scope, b"origin"):
            return 403, f"this server has no token ({TOKEN_FILE}) and answers programs on its own machine alone"
        return None


def _asks_for_health(scope: Scope) -> bool:
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and path in (OPEN_PATH, root + OPEN_PATH)


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
            return
        prefix = "websocket.http"
    body = json.dumps({"error": {"message": message, "type": "Unauthorized", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})
