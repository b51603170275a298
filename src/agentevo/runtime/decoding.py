"""Decodes JSON as typed records, in any thread.

msgspec inspects a type at its first use. A second thread that decodes the type before the end of
that ends the process (SIGSEGV, msgspec 0.22), so only one thread at a time makes decoders.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LOCK = threading.Lock()
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode_json(content: bytes | str, kind: type[T]) -> T:
    """The record of this type. Raises msgspec.MsgspecError, UnicodeDecodeError and RecursionError
    for another content."""
    with _LOCK:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind)
        decoder: msgspec.json.Decoder[T] = _DECODERS[kind]

    return decoder.decode(content)
