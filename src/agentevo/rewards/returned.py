"""Values that a user's code returned (numbers, truth values, names), checked and made plain Python
ones: numpy and torch scalars are welcome, and a text is never read as a number.

Each function raises TypeError or ValueError with a message that names the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 1e30
"""Rewards beyond it are mistakes: their squares and sums leave the range of floating point."""


def plain_number(value: Any, what: str) -> float:
    """A finite number of at most LARGEST."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # noqa: BLE001 (whatever `__float__` of a user's object raises)
        raise TypeError(f"{what} is {value!r}: give a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    if abs(number) > LARGEST:
        raise ValueError(f"{what} is {number:g}: numbers go up to {LARGEST:g}")
    return number


def plain_bool(value: Any, what: str) -> bool:
    """A truth value: a bool of Python, numpy or torch, or 0 or 1."""
    scalar = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(scalar, int) and scalar in (0, 1):
        return bool(scalar)
    raise TypeError(f"{what} is {value!r}: give True or False")


def plain_numbers(values: Any, what: str) -> dict[str, float]:
    """A mapping from names to numbers."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} is {values!r}: give a mapping from names to numbers")
    return {
        _name(name, what): plain_number(value, f"{what}: {name!r}")
        for name, value in values.items()
    }


def named_parts(values: Mapping[Any, Any], what: str) -> dict[str, float]:
    """The parts of a reward that was returned as a mapping; their names may be anything."""
    return plain_numbers({str(name): value for name, value in values.items()}, what)


def _name(name: Any, what: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{what} has the name {name!r}: names are texts")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{what} has the name {name!r}, which is no Unicode: it holds half of a "
                "surrogate pair"
            ) from None
    return name
