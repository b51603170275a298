"""Numbers as people write them: `1,234.5`, `1.234,5`, `$3`, `-2e3`, `3/4`, `50%`.

A dash and a blank at the beginning of a line are a list's, where the text has several lines: the
number of `- 5` is 5 there, and -5 where it is all that the text says.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z_.\d])                           # not inside a word or another number
    (?: (?P<european>[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}))(?![.,]?\d)
      | (?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+) )
    (?:[eE](?P<exponent>[-+]?\d{1,3}))?
    (?:[ \t]{0,3}/[ \t]{0,3}(?P<below>\d+(?:\.\d+)?))?
    (?P<percent>[ \t]{0,3}\\?%)?
    """,
    re.VERBOSE,
)
_MINUS = re.compile(r"[-\u2212][ \t]{0,3}[$\u20ac\u00a3]?[ \t]{0,3}\Z")
_BULLET = re.compile(r"^[ \t]*[-\u2212][ \t]+\Z", re.MULTILINE)
_INSIDE = re.compile(r"[A-Za-z_.\d]")
LONGEST = 400
"""Digits of a number: longer ones leave the range of a float."""


def last_numeral(text: str) -> tuple[str, float] | None:
    """The last number in a text as it is written, and its value; `50%` is 0.5. None: there is
    none."""
    for match in reversed(list(_NUMBER.finditer(text))):
        value = _value(match)
        if value is None:
            continue
        minus = _MINUS.search(text, max(0, match.start() - 8), match.start())
        if minus is None or not _is_a_sign(text, minus):
            return match[0].rstrip("."), value
        return text[minus.start() : match.end()].rstrip("."), -value

    return None


def readings(text: str) -> tuple[float, ...]:
    """What the last number in a text may mean: `50%` is 0.5, and 50 where percents are asked for.
    Empty: there is none."""
    stated = last_numeral(text)
    if stated is None:
        return ()
    return (stated[1], stated[1] * 100) if stated[0].endswith("%") else (stated[1],)


def _is_a_sign(text: str, minus: re.Match[str]) -> bool:
    """Unlike a minus right behind a word or a number, as in `5-3`, and a list's dash."""
    place = minus.start()
    if place > 0 and _INSIDE.match(text, place - 1):
        return False
    line = text.rfind("\n", 0, place) + 1
    is_bullet = bool(_BULLET.match(text[line : minus.end()]))
    return not (is_bullet and "\n" in text.strip())


def _value(match: re.Match[str]) -> float | None:
    digits = match["digits"]
    below = match["below"] or "1"
    if digits is None:
        digits = match["european"].replace(".", "").replace(",", ".")
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
