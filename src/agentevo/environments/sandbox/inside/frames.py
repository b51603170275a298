"""Messages between a host, a sandbox's supervisor and its interpreter: four bytes of length, then
JSON. This is the only format read from a stream that untrusted code can write to."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct(">I")
LARGEST_CALL = 2**20
"""The most bytes of a tool's call, and of its result."""


class BadFrame(Exception):
    """The received bytes are not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """Raises ValueError or RecursionError for a value that JSON can't represent."""
    # untrusted code can put lone surrogates in file names and errors, and UTF-8 can't encode them
    text = json.dumps(message, allow_nan=False, ensure_ascii=False)
    content = text.encode("utf-8", "replace")
    return HEADER.pack(len(content)) + content


class Frames:
    """Cuts a stream of bytes into messages of at most `longest` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk

    def next(self) -> dict[str, Any] | None:
        """The next whole message, or None. Raises BadFrame."""
        if len(self._buffer) < HEADER.size:
            return None

        (length,) = HEADER.unpack(self._buffer[: HEADER.size])
        if length > self._longest:
            raise BadFrame(f"a message of {length:,} bytes: the limit is {self._longest:,}")
        if len(self._buffer) < HEADER.size + length:
            return None

        content = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadFrame("a message that is not JSON") from error

        if not isinstance(message, dict):
            raise BadFrame("a message that is not a JSON object")

        return message


def write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def clip(text: str, longest: int) -> str:
    """The text. If it is longer than the limit, only its head and tail."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
