"""Makes texts of other authors safe to show: any content is treated as text only.

`shown` does that. It returns plain text, which templates escape.
"""

from __future__ import annotations

import re

LIMIT = 20_000
"""Characters of one text that a page shows by default."""

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES[0x7F] = 0x2421
_TURNING = {
    0x061C: "ALM",
    0x200E: "LRM",
    0x200F: "RLM",
    0x202A: "LRE",
    0x202B: "RLE",
    0x202C: "PDF",
    0x202D: "LRO",
    0x202E: "RLO",
    0x2066: "LRI",
    0x2067: "RLI",
    0x2068: "FSI",
    0x2069: "PDI",
}
"""Marks that change the direction of writing, with which a text could imitate another."""
_SYMBOLS: dict[int, str | int] = {
    **_PICTURES,
    **{code: f"⟨{name}⟩" for code, name in _TURNING.items()},
    **{code: f"⟨{code:02X}⟩" for code in range(0x80, 0xA0)},
    0x2028: "⟨LS⟩",
    0x2029: "⟨PS⟩",
    0xFEFF: "⟨BOM⟩",
}
_BROKEN = re.compile("[\ud800-\udfff\ufffe\uffff]")


def shown(value: object, limit: int = LIMIT) -> str:
    """`value` as text for a page. Control characters, including ANSI escapes, and marks that change
    the direction of writing become visible symbols; an invalid character becomes U+FFFD; bytes are
    read as UTF-8. A text longer than `limit` is cut, and its end gives its length."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        full_text = bytes(value[: 4 * limit + 4]).decode("utf-8", "replace")
        length = max(len(value), len(full_text))
    else:
        full_text = value if isinstance(value, str) else str(value)
        length = len(full_text)

    cut = full_text[:limit].replace("\r\n", "\n")
    text = _BROKEN.sub("\ufffd", cut).translate(_SYMBOLS)
    return text if length <= limit else f"{text}… ({length:,} characters)"


def one_line(value: object, limit: int = 200) -> str:
    """`shown`, on one line."""
    return shown(" ".join(str(value)[: 4 * limit].split()) or "", limit)


def without_folders(value: object) -> str:
    """A text in which absolute paths are replaced by their last names: `/runs/a/step-7` is
    `step-7`."""
    return re.sub(r"(?<![^\s@])/(?:[^/\s@]+/)+(?=[^/\s@])", "", str(value))
