"""A turn's numbers as arrays of the same width as in the store."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

TURN_COLUMNS = {"prompt_ids": "i", "completion_ids": "i", "logprobs": "f", "versions": "i"}
"""Maps a turn's columns to the type codes of their arrays."""


def column_of(what: str, code: str, values: Sequence[float]) -> array[Any]:
    """Raises TypeError or OverflowError for a value that such an array can't hold."""
    column: array[Any] = array(code)
    try:
        column.frombytes(struct.pack(f"={len(values)}{code}", *values))
    except struct.error as error:
        numbers = (int,) if code == "i" else (int, float)
        wrong = next(x for x in values if not isinstance(x, numbers) or abs(x) >= 2**31)
        kind = OverflowError if isinstance(wrong, int) else TypeError
        name = "32-bit integer" if code == "i" else "number"
        raise kind(f"{what}: {wrong!r} is not a valid {name}") from error
    except OverflowError as error:
        largest = max((value for value in values if math.isfinite(value)), key=abs)
        raise OverflowError(f"{what}: {largest} does not fit in a float32") from error

    return column
