"""Numbers as people write them: `1,234.5`, `$3`, `-2e3`, `3/4`, `50%`."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z_.\d])                           # not inside a word or another number
    (?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)
    (?:[eE](?P<exponent>[-+]?\d{1,3}))?
    (?:[ \t]{0,3}/[ \t]{0,3}(?P<below>\d+(?:\.\d+)?))?
    (?P<percent>[ \t]{0,3}\\?%)?
    """,
    re.VERBOSE,
)
_MINUS = re.compile(r"[-\u2212][ \t]{0,3}[$\u20ac\u00a3]?[ \t]{0,3}\Z")
_INSIDE = re.compile(r"[A-Za-z_.\d]")
LONGEST = 400
"""Digits of a number: longer ones leave the range of a float."""


def last_number(text: str) -> float | None:
    """The last number in a text; `50%` is 0.5. None: there is none."""
    stated = last_numeral(text)
    return None if stated is None else stated[1]


def last_numeral(text: str) -> tuple[str, float] | None:
    """The last number in a text as it is written, and its value."""
    for match in reversed(list(_NUMBER.finditer(text))):
        value = _value(match)
        if value is None:
            continue
        minus = _MINUS.search(text, max(0, match.start() - 8), match.start())
        if minus is None or _is_inside_a_word(text, minus.start()):
            return match[0].rstrip("."), value
        return text[minus.start() : match.end()].rstrip("."), -value
    return None


def _is_inside_a_word(text: str, place: int) -> bool:
    """Whether a minus at this place stands right behind a word or a number, as in `5-3`."""
    return place > 0 and bool(_INSIDE.match(text, place - 1))


def _value(match: re.Match[str]) -> float | None:
    digits, below = match["digits"], match["below"] or "1"
    if max(len(digits), len(below)) > LONGEST:
        return None
    value = Fraction(digits.replace(",", "").rstrip("."))
    value *= Fraction(10) ** int(match["exponent"] or 0)
    divisor = Fraction(below)
    if divisor == 0:
        return None
    try:
        return float(value / divisor / (100 if match["percent"] else 1))
    except OverflowError:
        return None
