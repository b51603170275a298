"""Checks values that a user's code returned (numbers, booleans, names) and converts them to plain
Python values. It accepts numpy and torch scalars, and never reads a text as a number.

Each function raises TypeError or ValueError with a message that names the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentevo.errors import shown

MAX_REWARD = 1e12
"""Larger rewards are mistakes: the squares of such gradients, summed over a model, overflow in
float32."""
MAX_METRIC = 1e30
"""The limit of numbers that are only averaged, such as times in nanoseconds."""
MAX_NAMES = 200
"""The maximum number of names in an attempt's metrics or reward parts. Each is a column of the
metrics."""
MAX_NAME = 200
"""The maximum number of characters of such a name."""


def plain_number(value: Any, what: str, largest: float = MAX_REWARD) -> float:
    """A finite number of at most `largest`."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # noqa: BLE001 (`__float__` of a user's object can raise anything)
        raise TypeError(f"{what} is {shown(value)}: give a number") from None

    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    if abs(number) > largest:
        raise ValueError(f"{what} is {number:g}: numbers go up to {largest:g}")

    return number


def plain_bool(value: Any, what: str) -> bool:
    """A bool of Python, numpy or torch, or 0 or 1, as a Python bool."""
    scalar = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(scalar, int) and scalar in (0, 1):
        return bool(scalar)
    raise TypeError(f"{what} is {shown(value)}: give True or False")


def plain_numbers(values: Any, what: str, largest: float = MAX_REWARD) -> dict[str, float]:
    """A mapping from names to numbers."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} is {shown(values)}: give a mapping from names to numbers")
    if len(values) > MAX_NAMES:
        raise ValueError(f"{what} has {len(values)} names: give at most {MAX_NAMES}")
    return {
        _name(name, what): plain_number(value, f"{what}: {shown(name)}", largest)
        for name, value in values.items()
    }


def named_parts(values: Mapping[Any, Any], what: str) -> dict[str, float]:
    """The parts of a reward that was returned as a mapping. Any names are allowed."""
    return plain_numbers({str(name): value for name, value in values.items()}, what)


def _name(name: Any, what: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{what} has the name {shown(name)}: names are texts")
    if len(name) > MAX_NAME:
        raise ValueError(f"{what} has a name of {len(name)} characters: give at most {MAX_NAME}")

    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{what} has the name {shown(name)}, which is not valid Unicode: it has half of "
                "a surrogate pair"
            ) from None

    return name
