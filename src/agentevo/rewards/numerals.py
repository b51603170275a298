r"""Numbers as people and TeX write them: `1,234.5`, `1.234,5`, `1 000 000`, `9{,}500`, `1'234`,
`$3`, `-2e3`, `5 \times 10^3`, `2^{10}`, `3/4`, `\frac{3}{4}`, `1 1/2`, `50%`, `0x1F`,
`1.5 million`, `150万`.

`write_plainly` first rewrites a text with keyboard signs and joined groups of digits. A number that
is part of an expression (`2\sqrt{3}`, `\frac{x}{2}`, `3\pi`, `2x3`), of a time or ratio (`1:30`),
of several words (`2 million 500`) or of an abbreviation (`5k`, `$2M`) does not count, and no
earlier number counts in its place. An exponent or index does not count either (`12 m^2` is 12).

In a text of several lines, a dash and a blank at the beginning of a line mark a list item. So `- 5`
is 5 there, and -5 if it is the whole text. A comma before three digits groups them. Any other comma
between digits is a decimal comma, except within brackets and lists. `1.000` is 1.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_FRACTIONS = "\u00bc-\u00be\u2150-\u215e"
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b"
_SIGNS = str.maketrans(
    {
        **{code: chr(code - 0xFEE0) for code in (*range(0xFF10, 0xFF1A), 0xFF05, 0xFF0D, 0xFF0E)},
        **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\ufe63"), "-"),
        "\u2044": "/",
        "\uff0f": "/",
        "\u066a": "%",
        "\u066b": ".",
        "\u066c": ",",
        "\u2019": "'",
        **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f"), " "),
    }
)
_DASH = re.compile(
    r"(?<![\w)\]}])\u2013(?=[\\$\u20ac\u00a3\u00a5]{0,2}[\d.])|(?:(?<=[=(])|(?<=[=(] ))\u2013"
)
_FRACTION = re.compile(rf"(\d[ \t]{{0,3}})?([{_FRACTIONS}])")
_RAISED = re.compile(rf"(?<=[\w)}}])[{_SUPERSCRIPTS}]+")
_GROUPS = re.compile(
    r"""
    (?<![\w.,]) [1-9]\d{0,2}
    (?P<mark> \{,\} | \\[,;:!\ ] | ,\\! | ~ | ['_ ] ) \d{3}
    (?: (?P=mark) \d{3} )*
    (?! (?P=mark)?\d | [ ]?/ )
    """,
    re.VERBOSE,
)
_NO_DIGIT = re.compile(r"\D")
_INDIAN = re.compile(r"(?<![\w.,])[1-9]\d?(?:,\d\d)+,\d{3}(?![\w,])")
_TEX_POINT = re.compile(r"(?<=\d)\{[,.]\}(?=\d)")
_DECIMAL_COMMA = re.compile(
    r"(?<![\w.,(\[{])(?<!,[ \t])(\d{1,400}),(\d\d?|\d{4,400})(?![\w,]|\.\d|[ \t]{0,3}[)\]}\\])"
)
_GAP = r"(?:[ \t~$*-]|\\[ ,;:!)]){0,4}"
_TENS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CHINESE_TENS = {"\u767e": 2, "\u5343": 3, "\u4e07": 4, "\u842c": 4, "\u4ebf": 8, "\u5104": 8}
_UNITS = "\u5206\u514b\u7c73\u74e6\u5361\u5e15\u4f0f\u8d6b\u5b57\u5347\u5428"
_SCALE_WORD = (
    rf"(?:(?:\\text\{{[ ]{{0,3}})?(?i:{'|'.join(_TENS)})(?i:s?)(?!-?[A-Za-z])\}}?"
    rf"|[\u767e\u5343](?![{_UNITS}])|[\u4e07\u842c\u4ebf\u5104])"
)
SCALE = rf"(?:{_GAP}{_SCALE_WORD}){{1,3}}"
"""A regular expression for the words after a number that multiply it: ` million`, `\u4e07`."""
EUROPEAN_MILLIONS = r"[1-9]\d{0,2}(?:\.\d{3}){2,}(?:,\d{1,400})?"
"""A regular expression for `1.000.000` and `1.234.567,8`."""
CODE = (
    r"0(?:[xX][0-9A-Fa-f]{1,300}|[oO][0-7]{1,400}|[bB][01]{1,400})"
    r"(?!\w|\.\w|[ ]?(?:\^|\*\*\w))"
)
"""A regular expression for integers as programs write them: `0x1F`, `0o17`, `0b101`."""
_ONE_SCALE = re.compile(rf"(?i:{'|'.join(_TENS)})|[{''.join(_CHINESE_TENS)}]")
_ESCAPED = re.compile(r"\\(?=[$%])")

_PLAIN = r"[ \t]{0,3}([-+]?\d[\d.,]{0,400})[ \t]{0,3}"
_TEX_FRACTION = re.compile(
    rf"(\d[ \t]{{0,3}})?\\[dtc]?frac[ \t]{{0,3}}(?:\{{{_PLAIN}\}}|(\d))"
    rf"[ \t]{{0,3}}(?:\{{{_PLAIN}\}}|(\d))"
)
_TIMES = r"\\times|\\cdot|[*\u00d7\u00b7\u22c5]"
_RAISED_TO = (
    r"[ \t]{{0,3}}(?:\^|\*\*)[ \t]{{0,3}}"
    r"(?:\{{[ \t]{{0,3}}(?P<{0}_braced>[-+]?\d{{1,3}})[ \t]{{0,3}}\}}"
    r"|\((?P<{0}_bracketed>[-+]?\d{{1,3}})\)|(?P<{0}_bare>[-+]?\d{{1,3}}))(?![\d.]*\d)"
)
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_.\d^])(?<![\^_]\{{)(?<!\^[-+])(?<!\^\{{[-+]) # not in a word, a number, an exponent
    (?: (?P<whole>\d{{1,9}}(?:,\d{{3}}){{0,9}})[ \t]{{1,3}}(?=\d{{1,9}}/\d) )?
    (?: (?P<code>{CODE})
      | (?P<european>{EUROPEAN_MILLIONS}|[1-9]\d{{0,2}}\.\d{{3}},\d+)(?![.,]?\d)
      | (?P<digits>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+\.?\d*|\.\d+) )
    (?:[eE](?P<exponent>[-+]?\d{{1,3}})
      |[ \t]{{0,3}}(?:{_TIMES}|[xX])[ \t]{{0,3}}10{_RAISED_TO.format("ten")}
      |{_RAISED_TO.format("power")})?
    (?:[ \t]{{0,3}}/[ \t]{{0,3}}(?P<below>\d+(?:\.\d+)?))?
    (?P<scale>{SCALE})?
    (?P<percent>[ \t]{{0,3}}(?:%|per[ ]?cent\b))?
    """,
    re.VERBOSE,
)
_MINUS = re.compile(r"-[ \t]{0,3}[$\u20ac\u00a3\u00a5]?[ \t]{0,3}[({]?\Z")
_BULLET = re.compile(r"(?:\A|\n)[ \t]*-[ \t]+\Z")
_INSIDE = re.compile(r"[A-Za-z_.\d]")
_OF_AN_EXPONENT = re.compile(r"[\^_]\{[^{}]*\Z")
_COLON = "[:\uff1a\u2236]"
_IN_AN_EXPRESSION = re.compile(
    r"(?: (?:\\sqrt|\\[dt]?binom|\u221a|\bsqrt\()[^A-Za-z=\n]*"
    r"  | \\[dtc]?frac[ ]{0,3}(?:\{[^{}=]*\}[ ]{0,3})?\{?[^{}=]*"
    rf"  | (?:\\pi|\u03c0)[ ]{{0,3}}(?:{_TIMES}|/)?[ ]{{0,3}}"
    rf"  | (?<![A-Za-z_.,\d])[\d.,]{{1,80}}(?:{_COLON}|[ \t]{{1,3}}{_COLON}[ \t]{{0,3}})"
    rf"  | \d{SCALE}[ \t]{{0,3}}(?:and[ \t]{{1,3}})?)\Z",
    re.VERBOSE,
)
_CONTINUES = re.compile(
    rf"[xX]\w|(?<![\d.]0)(?<=0)[oObB]\d|k(?!\w)|{_COLON}\d|[ \t]{{1,3}}{_COLON}[ \t]{{0,3}}\d"
    rf"|{_GAP}(?i:{'|'.join(_TENS)})(?:(?i:ths?)(?![A-Za-z])|-[A-Za-z])"
    r"|[ \t]{0,3}(?:\^(?!\{?\\(?:circ|text\{(?:st|nd|rd|th)\}))"
    rf"|\*\*(?=[\w({{])|_(?=[\d{{])|(?:{_TIMES})?[ \t]{{0,3}}"
    r"(?:\\pi(?![a-z])|\u03c0|\\sqrt|\u221a|sqrt\(|\\[dtc]?frac|\\log|\\ln))"
)
_PRICE = re.compile(r"[$\u20ac\u00a3\u00a5][ \t]{0,3}\Z")
_SHORT_SCALE = re.compile(r"[ ]?(?:[kKmMbB]|bn|mn|tn)(?!\w)")
LOOKBACK_CHARS = 80
"""The number of characters before a number in which an expression is searched that contains the
number."""
MAX_DIGITS = 400
"""The maximum number of digits of a number. Longer numbers exceed the range of a float."""


def write_plainly(text: str) -> str:
    r"""The text with its numbers as a keyboard writes them: full-width digits, dashes that are
    minus signs, one-character fractions and raised digits (`^{2}`) are rewritten, and groups of
    digits (`1\,000`, `1 000`, `9{,}500`) are joined. A comma or point in braces between other
    digits (`3{,}5`) is a point."""
    text = _DASH.sub("-", text.translate(_SIGNS))
    text = _FRACTION.sub(_spell_fraction, text)
    text = _RAISED.sub(lambda raised: f"^{{{unicodedata.normalize('NFKC', raised[0])}}}", text)
    text = text.replace("\u2212", "-")  # the `^` of a raised minus
    text = _GROUPS.sub(lambda groups: _NO_DIGIT.sub("", groups[0]), text)
    return _TEX_POINT.sub(".", text)


class Numeral(NamedTuple):
    """A number in a text."""

    text: str
    """The number as plainly written, with its sign."""
    value: float
    is_percent: bool
    """Whether it is a percentage. The value of 50% is 0.5."""
    start: int
    end: int
    """Its position in the plainly written text, without the sign."""

    @property
    def readings(self) -> tuple[float, ...]:
        """Its possible values. 50% is 0.5, or 50 for a question about percents."""
        return (self.value, self.value * 100) if self.is_percent else (self.value,)


def last_numeral(text: str) -> tuple[str, float] | None:
    """The last number in a text, plainly written, and its value. `50%` is 0.5. None if there is no
    number, or if it is part of an expression."""
    last = next(numerals_from_the_end(plain(text)), None)
    return None if last is None else (last.text, last.value)


def readings(text: str) -> tuple[float, ...]:
    """The possible values of the last number in a text. Empty if there is no number."""
    last = next(numerals_from_the_end(plain(text)), None)
    return () if last is None else last.readings


def plain(text: str) -> str:
    """The text with its numbers as `numerals_from_the_end` reads them."""
    text = _INDIAN.sub(
        lambda groups: _NO_DIGIT.sub("", groups[0]), write_plainly(_ESCAPED.sub("", text))
    )
    text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    return _TEX_FRACTION.sub(_write_slash, text)


def numerals_from_the_end(text: str) -> Iterator[Numeral | None]:
    """The numbers of a plainly written text, the last number first. None for a number that is part
    of an expression."""
    has_lines = "\n" in text.strip()
    for match in reversed(list(_NUMBER.finditer(text))):
        near = text[max(0, match.start() - LOOKBACK_CHARS) : match.start()]
        if _OF_AN_EXPONENT.search(near):
            continue

        is_cut_price = _PRICE.search(near) and _SHORT_SCALE.match(text, match.end())
        if is_cut_price or _IN_AN_EXPRESSION.search(near) or _CONTINUES.match(text, match.end()):
            yield None
            continue

        value = _value(match)
        if value is None:
            continue

        written = match[0].rstrip(".")
        if _has_minus(near, has_lines):
            written = f"-{written}"
            value = -value

        yield Numeral(written, value, match["percent"] is not None, match.start(), match.end())


def power_of_ten(scale: str) -> int:
    """The exponent of the power of ten that the words of a scale mean: 6 for ` million`."""
    words = _ONE_SCALE.findall(scale)
    return sum(_CHINESE_TENS.get(word) or _TENS[word.lower()] for word in words)


def write_european(digits: str) -> str:
    """A number such as `1.234.567,8` with a decimal point: `1234567.8`."""
    return digits.replace(".", "").replace(",", ".")


def _spell_fraction(fraction: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", fraction[2]).partition("\u2044")
    return f"{fraction[1].rstrip()} {above}/{below}" if fraction[1] else f"{above}/{below}"


def _write_slash(fraction: re.Match[str]) -> str:
    whole_part, above, digit_above, below, digit_below = fraction.groups()
    plain = f"{above or digit_above}/{below or digit_below}"
    return f"{whole_part.rstrip()} {plain}" if whole_part else plain


def _has_minus(near: str, has_lines: bool) -> bool:
    """Whether a minus sign is right before a number. A minus after a word or a number, as in `5-3`,
    and the dash of a list don't count."""
    minus = _MINUS.search(near, max(0, len(near) - 9))
    if minus is None or (minus.start() > 0 and _INSIDE.match(near, minus.start() - 1)):
        return False
    return not (has_lines and _BULLET.search(near))


def _value(match: re.Match[str]) -> float | None:
    digits = match["digits"]
    below = match["below"] or "1"
    if match["code"]:
        digits = str(int(match["code"], 0))
    elif digits is None:
        digits = write_european(match["european"])
    if max(len(digits), len(below)) > MAX_DIGITS:
        return None

    value = Fraction(digits.replace(",", "").rstrip("."))
    ten = match["exponent"] or _exponent(match, "ten")
    power = _exponent(match, "power")
    divisor = Fraction(below)
    if divisor == 0 or (value == 0 and (power or "").startswith("-")):
        return None

    try:
        if power is not None:
            value = Fraction(float(value) ** int(power))
        value *= Fraction(10) ** int(ten or 0)
        value = value / divisor + int((match["whole"] or "0").replace(",", ""))
        value *= Fraction(10) ** power_of_ten(match["scale"] or "")
        return float(value / (100 if match["percent"] else 1))
    except OverflowError:
        return None


def _exponent(match: re.Match[str], of: str) -> str | None:
    return match[f"{of}_braced"] or match[f"{of}_bracketed"] or match[f"{of}_bare"]
