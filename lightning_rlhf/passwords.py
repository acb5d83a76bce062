"""Passwords in addresses (``http://user:password@host``): where one is, and how an address is written without it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

IN_ADDRESS = re.compile(r"(?<=://)([^/@\s:'\"]*):([^/@\s'\"]+)@")
"""User and password of an address, anywhere in a text."""


def hidden(text: str) -> str:
    """The text with its passwords as ``***``."""
    return IN_ADDRESS.sub(r"\1:***@", text)


def without(address: str) -> str:
    """The address without its password, to be saved or logged. A web address loses the user name as well."""
    return IN_ADDRESS.sub("" if address.startswith("http") else r"\1@", address)


def credentials(address: str) -> tuple[str, str] | None:
    """User and password of an address."""
    found = IN_ADDRESS.search(address)
    return None if found is None else (unquote(found[1]), unquote(found[2]))


def keys_with(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys whose value has a password in an address, and that value with the password hidden."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_with(value, f"{key}.")
        elif IN_ADDRESS.search(str(value)):
            yield key, hidden(str(value))


def refused(key: str) -> str:
    """What is allowed in place of a password under this key."""
    if key.endswith("tracking_uri"):
        return (
            "the address without user and password, which would be saved with the run: MLflow takes them from the "
            "environment, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; a database with a password is named "
            "by MLFLOW_TRACKING_URI"
        )
    return "an address without a password, which would be saved with the run: give it by the environment"
