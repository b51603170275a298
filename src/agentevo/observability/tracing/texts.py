"""The texts of spans: of limited length, and without credentials.

Passwords in URLs (credentials.py), the values of environment variables whose names contain words
such as key, secret, token or password, and texts in the form of a key are left out. A secret that
looks like an ordinary word and is in no such variable is not recognised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import msgspec

from agentevo.errors import storable
from agentevo.runtime.credentials import without_passwords
from agentevo.types import Message, ToolCall

HIDDEN = "***"
MIN_SECRET_CHARS = 8
"""The minimum number of characters of a secret. A shorter value may be an ordinary word."""
CACHE_SIZE = 1024
"""The number of texts whose form without secrets is cached."""
MAX_CACHED_CHARS = 4096
"""The maximum length of a cached text, in characters."""
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:key|apikey|token|secret|password|passwd|pwd|pat|credentials?|headers)(?:_|$)"
)
_SECRET = re.compile(
    r"\b(?:(?:sk|pk|rk)[-_]|gh[opsu]_|github_pat_|glpat-|hf_|xox[abprs]-)[A-Za-z0-9_-]{16,}"
    r"|\bA[KS]IA[A-Z0-9]{16}\b"
    r"|(?i:\bbearer)\s[A-Za-z0-9._~+/-]{20,}=*"
    r"|(?i:(?<=\bauthorization: )(?:basic|token)\s)[A-Za-z0-9._~+/=-]+"
)
_MARGIN = 64
"""The characters that are reserved for everything but the content, such as the number of omitted
characters."""


class SpanTexts:
    """Shortens texts for spans and removes credentials. `longest`: the maximum number of characters
    of a text."""

    def __init__(self, longest: int, environment: Mapping[str, str] = os.environ) -> None:
        self.longest = longest
        values = {
            value
            for name, value in environment.items()
            if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET_CHARS
        }
        secret_values = sorted(values, key=len, reverse=True)
        self._secret_pattern = (
            re.compile("|".join(map(re.escape, secret_values))) if secret_values else None
        )

        # Caches names, and the messages that every turn of an attempt repeats.
        self._remembered = lru_cache(CACHE_SIZE)(self._without_secrets)

    def shown(self, text: str, longest: int | None = None) -> str:
        """The text without credentials, storable, and shortened in its middle."""
        longest = self.longest if longest is None else longest
        # The search covers the text near the cut, so that no half of a secret remains.
        text = shorten_middle(text, longest + 2 * MAX_SECRET_CHARS)
        short = len(text) <= MAX_CACHED_CHARS
        text = self._remembered(text) if short else self._without_secrets(text)
        return storable(shorten_middle(text, longest), longest)

    def _without_secrets(self, text: str) -> str:
        if self._secret_pattern is not None:
            text = self._secret_pattern.sub(HIDDEN, text)
        return _SECRET.sub(HIDDEN, without_passwords(text))

    def messages(self, messages: Sequence[Message], *, finish_reasons: Sequence[str] = ()) -> str:
        """A chat as the conventions write it: JSON of roles and parts. Of a chat that is too long,
        the newest messages are kept, and of a long message its head and tail."""
        remaining = self.longest
        encoded_messages = list[msgspec.Raw]()
        for number in range(len(messages) - 1, -1, -1):
            if remaining <= _MARGIN:
                note = _note(f"{number + 1} earlier messages are left out")
                encoded_messages.append(msgspec.Raw(msgspec.json.encode(note)))
                break

            record = self._message(messages[number], remaining)
            if finish_reasons:
                record["finish_reason"] = finish_reasons[min(number, len(finish_reasons) - 1)]

            encoded = msgspec.json.encode(record)
            encoded_messages.append(msgspec.Raw(encoded))
            remaining -= len(encoded)

        return msgspec.json.encode(encoded_messages[::-1]).decode()

    def _message(self, message: Message, longest: int) -> dict[str, Any]:
        """The message's parts share `longest`, the first parts first. A note has the number of
        parts that do not fit."""
        named = {} if message.name is None else {"name": self.shown(message.name, _MARGIN)}
        record = {"role": message.role, **named}
        if message.role == "tool":
            response = self.shown(message.text, longest)
            part = {
                "type": "tool_call_response",
                "id": message.tool_call_id,
                "response": response,
            }
            return record | {"parts": [part]}

        makers: list[Callable[[int], dict[str, Any]]] = [
            lambda limit, kind=kind, text=text: {"type": kind, "content": self.shown(text, limit)}  # type: ignore[misc]
            for kind, text in (("reasoning", message.reasoning), ("text", message.text))
            if text
        ]
        makers += [partial(self._call, call) for call in message.tool_calls]
        parts: list[dict[str, Any]] = []
        for number, make in enumerate(makers):
            if number and longest <= _MARGIN:
                parts += _note(f"{len(makers) - number} further parts are left out")["parts"]
                break
            parts.append(make(longest))
            longest -= len(msgspec.json.encode(parts[-1]))

        return record | {"parts": parts}

    def _call(self, call: ToolCall, longest: int) -> dict[str, Any]:
        arguments_text = self.shown(call.arguments, longest)
        arguments: Any = arguments_text
        with suppress(msgspec.MsgspecError, RecursionError):  # the policy may write invalid JSON
            arguments = msgspec.json.decode(arguments_text)
        record = {"type": "tool_call", "name": self.shown(call.name, 200), "arguments": arguments}
        return record | ({"id": self.shown(call.id, 200)} if call.id else {})


MAX_SECRET_CHARS = 4096
"""The number of characters beyond a text's limit in which the end of a secret is searched that
begins within the limit."""


def shorten_middle(text: str, longest: int) -> str:
    """The head and tail of a text, with the number of characters that are left out between them."""
    if len(text) <= longest:
        return text
    note = f" ... [{len(text) - longest} characters] ... "
    room = max(longest - len(note), 0)
    head = room - room // 2
    return f"{text[:head]}{note}{text[len(text) - room // 2 :]}"[:longest]


def _note(text: str) -> dict[str, Any]:
    return {"role": "system", "parts": [{"type": "text", "content": f"[{text}]"}]}
