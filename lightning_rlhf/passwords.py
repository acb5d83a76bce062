"""Passwords in addresses (``http://user:password@host``): where one is, and how an address is written without it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

_NO_PORT = r"(?!\d*(?:[/?#\s]|$))"
IN_ADDRESS = re.compile(rf"(?<=://)([^/@\s:'\"]*):{_NO_PORT}(\S+)@")
"""User and password of an address, anywhere in a text; the password may hold slashes, quotes and at signs."""

_WITH_BLANKS = re.compile(rf"(?<=://)([^/@\s:'\"]*):{_NO_PORT}(.+)@", re.DOTALL)
"""The same in a value that is nothing but an address: the password may hold blanks, too."""

_TOKEN = re.compile(r"(https?://)[^/@\s:?#]+@")
"""A token in place of a user name."""

_IN_QUERY = re.compile(r"([?&;](?:ssl)?(?:password|passwd|pwd|token|access_token|api_key)=)[^&;\s'\"]+", re.IGNORECASE)
"""A password among the parameters of an address."""


_NAME = (
    r"(?:\w*_)?(?:passwords?|passwd|pwd|passphrase|api_?key|secret(?:_key)?|access_key|private_key|"
    r"access_token|auth_token|bearer_token|hf_token)"
)
_NAMED = re.compile(_NAME, re.IGNORECASE)
"""The last part of a key that holds a password; ``token`` alone may be a token of a text."""

_EMPTY = r"(?:null|none|''|\"\")\s*[,}\]]|\$\{"
_IN_BLOCK = re.compile(rf"[{{,\s](?:{_NAME})\s*:(?!\s*(?:{_EMPTY}))", re.IGNORECASE)
"""Such a key inside of a block that an override sets."""

_NOTHING = ("", "null", "''", '""')


def hidden(text: str) -> str:
    """The text with its passwords as ``***``."""
    text = IN_ADDRESS.sub(r"\1:***@", text)
    return _IN_QUERY.sub(r"\1***", _TOKEN.sub(r"\1***@", text)) if "://" in text else text


def is_in(value: str) -> bool:
    """Whether a value has a password in an address."""
    return hidden_value(value) != value


def is_in_word(word: str) -> bool:
    """Whether an override sets a password, in an address or under a key named so."""
    return is_in(word) or _is_named(word)


def hidden_word(word: str) -> str:
    """The override without its passwords; of one under a key named so the whole value is ``***``."""
    return f"{word.partition('=')[0]}=***" if _is_named(word) else hidden_value(word)


def _is_named(word: str) -> bool:
    key, _, value = word.partition("=")
    name, value = re.split(r"[.@+~]", key)[-1], value.strip()
    if _NAMED.fullmatch(name):
        return value not in _NOTHING and not value.startswith("${")
    return value.startswith(("{", "[")) and _IN_BLOCK.search(value) is not None


def hidden_value(value: str) -> str:
    """The value with its passwords as ``***``."""
    return hidden(_WITH_BLANKS.sub(r"\1:***@", value))


def without(address: str) -> str:
    """The address without its password, to be saved or logged. A web address loses the user name as well."""
    if address.startswith("http"):
        address = _TOKEN.sub(r"\1", _WITH_BLANKS.sub("", address))
    return hidden(_WITH_BLANKS.sub(r"\1@", address))


def credentials(address: str) -> tuple[str, str] | None:
    """User and password of an address."""
    found = _WITH_BLANKS.search(address)
    return None if found is None else (unquote(found[1]), unquote(found[2]))


def keys_with(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys that hold a password, by their name or in an address, each with its value, the password hidden."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_with(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            items = {str(number): item for number, item in enumerate(value) if isinstance(item, Mapping)}
            yield from keys_with(items, f"{key}.")
        elif _NAMED.fullmatch(str(name)) and value not in (None, "") and not str(value).startswith("${"):
            yield key, "***"
        elif is_in(str(value)):
            yield key, hidden_value(str(value))


def refused(key: str) -> str:
    """What is allowed in place of a password under this key."""
    if key.endswith("tracking_uri"):
        return (
            "the address without user and password, which would be saved with the run: MLflow takes them from the "
            "environment, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; a database with a password is named "
            "by MLFLOW_TRACKING_URI"
        )
    return "no password: a configuration is saved with its run. Let the code read it from the environment or a file"
