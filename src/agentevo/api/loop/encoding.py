"""Records as JSON."""

from __future__ import annotations

import threading
from array import array
from typing import Any, TypeVar

import msgspec

from agentevo.errors import BadRequestError

T = TypeVar("T")


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODERS_LOCK = threading.Lock()
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type. msgspec inspects a type at its first use, and a second thread that
    decodes it before the end of that ends the process (SIGSEGV). So only one thread makes decoders.
    """
    with _DECODERS_LOCK:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind)
        return _DECODERS[kind]


def encode(record: Any) -> bytes:
    """A record as JSON: numbers keep every bit. Raises BadRequestError for a program's value that
    JSON can't represent."""
    try:
        return _ENCODER.encode(record)
    except (TypeError, NotImplementedError, RecursionError, UnicodeEncodeError) as error:
        raise BadRequestError(f"this value can't be sent: {error}") from error


def decode(content: bytes, kind: type[T]) -> T:
    """The inverse. Raises BadRequestError for an invalid text."""
    try:
        return _decoder(kind).decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequestError(f"this is no {kind.__name__}: {error}") from error
    except (TypeError, OverflowError) as error:  # a turn's column that no array can hold
        raise BadRequestError(f"this is no {kind.__name__}: {error}") from error
