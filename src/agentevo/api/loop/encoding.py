"""Records as JSON."""

from __future__ import annotations

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
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequestError(f"this is no {kind.__name__}: {error}") from error
    except (TypeError, OverflowError) as error:  # a turn's column that no array can hold
        raise BadRequestError(f"this is no {kind.__name__}: {error}") from error
