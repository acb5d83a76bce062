"""People told, by the library apprise: Slack, DingTalk, e-mail, any webhook. A failure is a line in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf import passwords
from lightning_rlhf.errors import InputError

log = logging.getLogger(__name__)

_LONGEST = 15_000
"""Characters of a message; chats refuse longer ones."""
PATIENCE = 60.0
"""Seconds for which the end of the supervisor waits for messages that are being sent."""


class Notifier:
    """Sends each message to every address, in a thread of its own: a slow server does not delay a retry.

    Args:
        addresses: of apprise; they may hold secrets, and are never printed.

    Raises:
        InputError: apprise is missing, or does not know one of the addresses.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._services: list[tuple[str, Any]] = []
        self._threads: list[threading.Thread] = []
        if not addresses:
            return
        try:
            import apprise
        except ImportError as error:
            raise InputError('supervise.notify needs apprise: pip install "lightning-rlhf[notify]"') from error
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its lines name addresses
        for number, address in enumerate(addresses):
            scheme = address.partition("://")[0]
            service = apprise.Apprise()
            if not service.add(address):
                raise InputError(f"supervise.notify[{number}] ({scheme}://***) is no address that apprise knows")
            self._services.append((f"{scheme}://***", service))

    def send(self, title: str, text: str, report: Path | None = None) -> None:
        """Send a message, with the text of a report if there is one, and return at once."""
        if not self._services:
            return
        if report is not None:
            try:
                text = f"{text}\n\n{report.read_text(encoding='utf-8')}"
            except OSError as error:
                log.warning("the notification is without the report: %s", error)
        text = passwords.hidden(text)
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}\n... (the whole report: {report})"
        for name, service in self._services:
            thread = threading.Thread(target=_send, args=(name, service, title, text), name="notify", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait for messages that are being sent, but not for ever."""
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                log.warning("a notification was not sent within %.0f s", seconds)
        self._threads.clear()


def _send(name: str, service: Any, title: str, text: str) -> None:
    try:
        sent = service.notify(title=title, body=text)
    except Exception as error:  # whatever a plugin raises: the training goes on
        log.warning("a notification to %s failed: %s", name, type(error).__name__)
        return
    if not sent:
        log.warning("a notification to %s failed", name)
