"""People told: a local webhook and a local mail server get the messages; a failing one changes nothing."""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lightning_rlhf.errors import InputError
from lightning_rlhf.supervise.notify import Notifier

pytest.importorskip("apprise")


class Webhook(HTTPServer):
    """Keeps the JSON objects that are posted; answers with a status of its own."""

    def __init__(self, status: int = 200) -> None:
        received: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.received = received
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"json://127.0.0.1:{self.server_port}/hook-secret"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server
        server.shutdown()


class Mail(socketserver.StreamRequestHandler):
    """As much of SMTP as a message needs."""

    received: list[str]

    def handle(self) -> None:
        self._say("220 here")
        while line := self.rfile.readline().decode():
            verb = line[:4].upper()
            if verb == "DATA":
                self._say("354 go on")
                text = ""
                while (part := self.rfile.readline().decode()) != ".\r\n":
                    text += part
                self.received.append(text)
            self._say("221 bye" if verb == "QUIT" else "250 ok")
            if verb == "QUIT":
                return

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


def test_a_webhook_gets_title_text_and_report(webhook: Webhook, tmp_path: Path) -> None:
    report = tmp_path / "attempt_01.md"
    report.write_text("# Attempt 1: hang\nhttp://me:password@host\n", encoding="utf-8")
    notifier = Notifier([webhook.address])
    notifier.send("run: crash (hang), trying again", "with the same settings", report)
    notifier.wait()
    [message] = webhook.received
    assert message["title"] == "run: crash (hang), trying again"
    assert (
        message["message"].startswith("with the same settings\n\n# Attempt 1: hang") and "me:***@" in message["message"]
    )


def test_a_mail_server_gets_the_message() -> None:
    handler = type("Handler", (Mail,), {"received": []})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        notifier = Notifier([f"mailto://127.0.0.1:{port}?from=rlhf@example.com&to=me@example.com&mode=insecure"])
        notifier.send("run: given up (hang)", "all retries are used (3)")
        notifier.wait()
        server.shutdown()
    [mail] = handler.received  # type: ignore[attr-defined]
    assert "given up" in mail and "all retries are used (3)" in mail


def test_a_failing_notification_is_a_line_without_the_address(caplog: pytest.LogCaptureFixture) -> None:
    with Webhook(status=500) as server, caplog.at_level(logging.INFO):
        notifier = Notifier([server.address, "json://127.0.0.1:9/other-secret"])
        notifier.send("run", "text")
        notifier.wait()
        server.shutdown()
    said = [entry.getMessage() for entry in caplog.records if entry.name.startswith("lightning_rlhf")]
    assert said == ["a notification to json://*** failed"] * 2
    assert "secret" not in caplog.text


def test_a_report_that_is_gone_and_a_long_one(
    webhook: Webhook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier([webhook.address])
    notifier.send("run", "text", tmp_path / "gone.md")
    notifier.wait()
    notifier.send("run", "x" * 50_000)
    notifier.wait()
    assert webhook.received[0]["message"] == "text" and "without the report" in caplog.text
    assert len(webhook.received[1]["message"]) < 16_000


def test_without_apprise_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    Notifier([]).send("nobody", "is told")
    with pytest.raises(InputError, match=r"lightning-rlhf\[notify\]"):
        Notifier(["json://host/"])
