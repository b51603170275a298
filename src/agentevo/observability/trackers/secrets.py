"""Removes keys, tokens and passwords from the configuration that trackers receive.

It removes the values of keys with the name of a secret, passwords in URLs, texts after `Bearer` or
a known prefix of keys, and the value of every environment variable with the name of a secret,
anywhere. `${env:NAME}` stays, because it names the place of a secret and not its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from agentevo.runtime.credentials import REFERENCE, without_passwords

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?i)(^|[^a-z0-9])(api[_-]?key|access[_-]?key|private[_-]?key|(auth[_-]?)?token|password|"
    r"passwd|passphrase|secret|secret[_-]?key|authorization|credentials?|cookie)$"
)
_KNOWN_BEGINNING = re.compile(
    r"(?i)\b(bearer\s+|basic\s+)\S+|\b(sk-|hf_|ghp_|github_pat_|xox[a-z]-|glpat-|AKIA)[\w-]{12,}"
)
MIN_SECRET_CHARS = 8
"""The minimum number of characters. A shorter value of an environment variable would match ordinary
texts."""


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same tree of plain values, with `***` in place of every secret."""
    secret_values = known_secrets()
    return {str(key): _plain(str(key), value, secret_values) for key, value in tree.items()}


def known_secrets() -> list[str]:
    """The values of the process's environment variables with the name of a secret, the longest
    first."""
    secret_values = {
        value
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_CHARS and _SECRET_NAME.search(name)
    }
    return sorted(secret_values, key=lambda value: (-len(value), value))


def _plain(name: str, value: Any, secret_values: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(str(key), item, secret_values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item, secret_values) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name) and value and not REFERENCE.fullmatch(value):
        return HIDDEN
    return clean_text(value, secret_values)


def clean_text(text: str, secret_values: list[str]) -> str:
    """A text without the secrets in it. `secret_values`: values to remove."""
    for value in secret_values:
        text = text.replace(value, HIDDEN)
    return _KNOWN_BEGINNING.sub(HIDDEN, without_passwords(text))
