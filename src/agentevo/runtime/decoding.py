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
    """The record of this type. Raises msgspec.DecodeError for any other content, also for a text
    that is not UTF-8 and for endless brackets."""
    with _LOCK:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind)
        decoder: msgspec.json.Decoder[T] = _DECODERS[kind]

    try:
        return decoder.decode(content)
    except UnicodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error}") from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
