"""Records as JSON."""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

from agentevo.errors import BadRequestError
from agentevo.runtime.decoding import decode_json

T = TypeVar("T")


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


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
        return decode_json(content, kind)
    # TypeError and OverflowError: a turn's column that no array can hold
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise BadRequestError(f"this is no {kind.__name__}: {error}") from error
