"""The trainer's client of one vLLM server, with all its requests."""

from __future__ import annotations

import http.client
import json
import math
import socket
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from lightning_rlhf.rollout.assemble import FINISH, Generated
from lightning_rlhf.rollout.token_check import TOKEN, TOKEN_FILE, bearer, is_loopback

CONNECT_TIMEOUT = 5.0
"""Seconds after which a host that does not answer counts as gone."""
CONTROL_TIMEOUT = 60.0
"""Seconds for requests that need no generation and move no weights."""
NO_LOGPROB = -9999.0
"""vLLM's value for a log-probability that is NaN or minus infinity."""
START = "start it by `lightning-rlhf serve`, or with the options that docs/rollouts.md lists"


class ServerFailed(Exception):
    """A server cannot be used at the moment; its requests go to other servers."""


class ServerMismatch(ServerFailed):
    """A server that runs, but with another model or with settings that would give wrong numbers."""


class Server:
    """A client of the vLLM server at an address.

    Args:
        url: ``http://host:port``.
        request_timeout: seconds for the response to one prompt, and for one transfer of the weights.
        token: sent with every request; required for servers on other machines.

    Raises:
        ValueError: ``url`` is not such an address, or names another machine and there is no token.
    """

    def __init__(self, url: str, *, request_timeout: float, token: str | None = None) -> None:
        address = urlsplit(url)
        try:
            valid = address.scheme == "http" and address.hostname and address.port and address.path in ("", "/")
        except ValueError:  # a port that is no number
            valid = False
        if not valid:
            raise ValueError(f"rollout.urls holds {url!r}, which is not allowed: addresses as http://host:port")
        if token is None and not is_loopback(address.hostname):
            raise ValueError(
                f"rollout.urls holds {url!r}, which is not allowed without a token: a server that others can reach "
                f"asks for one. Give it to servers and run by rollout.token_file or {TOKEN_FILE} (docs/rollouts.md)"
            )
        self.url = url.rstrip("/")
        self.facts: dict[str, Any] = {}
        self._host, self._port = str(address.hostname), int(address.port or 0)
        self._request_timeout, self._token = request_timeout, token
        self._open: set[socket.socket] = set()
        self._lock = Lock()

    def describe(self) -> dict[str, Any]:
        """Model and settings as the server's workers report them; kept in ``facts``.

        Raises:
            ServerFailed: it does not answer.
            ServerMismatch: it was started without the worker extension or without vLLM's development endpoints.
        """
        try:
            answers = self._workers("rlhf_describe", {}, CONTROL_TIMEOUT)
        except RequestRefused as error:
            raise ServerMismatch(f"{error}; {START}") from error
        self.facts = answers[0]
        return self.facts

    def take_weights(self, source: str, token: str, label: str) -> None:
        """Have the server fetch the weights ``label`` from the trainer; afterwards it samples from these alone.

        Requests that are still running there are aborted, the prefix cache is emptied after the last weight is written,
        and only then the server is given its new label and runs again.

        Raises:
            ServerFailed: with the reason; the server may hold a mixture of weights and must not be given work.
        """
        try:
            self._call("POST", "/pause?mode=abort", None, CONTROL_TIMEOUT)
            arguments = {"source": source, "token": token, "label": label}
            for answer in self._workers("rlhf_receive", arguments, self._request_timeout):
                if answer.get("label") != label:
                    raise ServerFailed(f"{self.url} did not take over the weights: {answer.get('error', answer)}")
            if not self._call("POST", "/reset_prefix_cache", None, CONTROL_TIMEOUT).get("success"):
                raise ServerFailed(f"{self.url} did not empty its prefix cache, which belongs to older weights")
            self._call("POST", "/update_weight_version", {"new_version": label}, CONTROL_TIMEOUT)
            self.resume()
        except RequestRefused as error:
            raise ServerMismatch(f"{error}; {START}") from error

    def holds(self, label: str) -> bool:
        """Whether the server completed a transfer of the weights ``label``, started by any process of the run.

        Raises:
            ServerFailed: it does not answer.
            ServerMismatch: it refuses the request.
        """
        try:
            held = {answer.get("label") for answer in self._workers("rlhf_held", {}, CONTROL_TIMEOUT)}
            # Set last, after the prefix cache was emptied.
            served = self._call("GET", "/weight_info", None, CONTROL_TIMEOUT).get("weight_version")
        except RequestRefused as error:
            raise ServerMismatch(f"{error}; {START}") from error
        return held == {label} and served == label

    def resume(self) -> None:
        """Let the server run again, if the process that paused it could not do so.

        Raises:
            ServerFailed: it does not answer.
        """
        self._call("POST", "/resume", None, CONTROL_TIMEOUT)

    def generate(self, request: dict[str, Any], *, label: str, version: int) -> Generated:
        """One response to one prompt, ids in and ids out.

        Args:
            request: body of ``/inference/v1/generate``, with a ``request_id``.
            label: the weights that must have sampled every token.
            version: version of the weights, for the rollout.

        Raises:
            ServerFailed: no response, an aborted one, or one by other weights (the server was restarted).
            RequestRefused: the server says that the request is wrong.
        """
        answer = self._call("POST", "/inference/v1/generate", request, self._request_timeout)
        try:
            if not answer["request_id"].endswith(request["request_id"]):
                raise ServerFailed(f"{self.url} answered another request than it was sent")
            [choice] = answer["choices"]
            labels = {span["version"] for span in choice["weight_versions"] or ()}
            ids, content, finish = choice["token_ids"], choice["logprobs"]["content"], choice["finish_reason"]
            logprobs = [_number(entry["logprob"]) for entry in content]
            scored = [entry["token_id"] for entry in content]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFailed(f"{self.url} sent no readable response ({type(error).__name__}: {error})") from error
        if labels != {label}:
            raise ServerFailed(f"{self.url} sampled with the weights {sorted(labels)} and not with {label!r}")
        if finish not in FINISH:
            raise ServerFailed(f"{self.url} did not complete a response (finish reason {finish!r})")
        if scored != ids:
            raise ServerFailed(f"{self.url} sent log-probabilities of other tokens than it generated")
        return Generated(ids, logprobs, finish, version)

    def disconnect(self) -> None:
        """Abort every request in progress; each raises :class:`ServerFailed` in its thread."""
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # already broken

    def _workers(self, method: str, arguments: dict[str, str], timeout: float) -> list[dict[str, Any]]:
        """The answers of all workers to a method of the worker extension."""
        body = {"method": method, "kwargs": arguments, "timeout": timeout}
        answers = self._call("POST", "/collective_rpc", body, timeout).get("results")
        if not answers or not all(isinstance(answer, dict) for answer in answers):
            raise ServerFailed(f"{self.url} sent no readable answer to {method}: {answers!r}")
        return answers

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT)
        opened: socket.socket | None = None
        try:
            connection.connect()
            opened = connection.sock
            self._prepare(opened, timeout)
            headers = {"Content-Type": "application/json", **bearer(self._token)}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailed(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._open.discard(opened)
            connection.close()
        return self._read(path, response.status, text)

    def _prepare(self, opened: socket.socket, timeout: float) -> None:
        """Set the long timeout, and TCP keep-alive, which detects a vanished host within half a minute."""
        opened.settimeout(timeout)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not on every platform
                opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._open.add(opened)

    def _read(self, path: str, status: int, text: str) -> dict[str, Any]:
        if status in (401, 403):
            raise ServerMismatch(
                f"{self.url}{path} answered {status}: {_message(text)}; rollout.token_file, {TOKEN_FILE} or {TOKEN} "
                "must give the token that the server was started with"
            )
        if status != 200:
            kind = RequestRefused if 400 <= status < 500 else ServerFailed
            raise kind(f"{self.url}{path} answered {status}: {_message(text)}")
        try:
            return json.loads(text or "{}")
        except ValueError as error:
            raise ServerFailed(f"{self.url}{path} sent no JSON: {text[:80]!r}") from error


def _number(logprob: Any) -> float:
    """A log-probability as vLLM sends it; NaN if it stands for one that was not finite.

    Raises:
        TypeError: it is no number.
    """
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)):
        raise TypeError(f"the log-probability {logprob!r} is no number")
    return float(logprob) if logprob > NO_LOGPROB else math.nan


class RequestRefused(Exception):
    """The server works and says that the request is wrong; another server would say the same."""


def _message(text: str) -> str:
    """The reason in vLLM's error answer, or the beginning of the answer."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
