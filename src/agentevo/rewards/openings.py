"""Finds where the stated answer begins in a reply, so that another answer can replace it.

The places are those of `answer_texts.py` that have a single such position: a tag, `boxed` and
`hashes`. A reply has no opening if it states no answer there, or two, because it is not clear which
of two answers counts. Every search takes time linear in the text.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_OTHERS = ("auto", "whole", "number", "json")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\boxed\s{0,9}\{")
_SPACE = re.compile(r"\s*")


def check_opening(place: str) -> str:
    """Returns the place. Raises ValueError for a place that has no opening."""
    if place in _OTHERS or not _WORD.fullmatch(place):
        raise ValueError(
            f"{place[:200]!r} is not a place where another answer can be put: give the name of "
            "an "
            "XML tag such as answer, boxed, or hashes"
        )
    return place


def opening_text(place: str) -> str:
    """The text before an answer at that place."""
    return {"boxed": "\\boxed{", "hashes": "####"}.get(place, f"<{place}>")


def find_opening(text: str, place: str) -> int | None:
    """The index of the answer's first character, after white space that belongs to the opening.
    None for a reply that does not state exactly one answer there."""
    if place == "boxed":
        begin = _box(text)
    elif place == "hashes":
        begin = text.index("####") + 4 if text.count("####") == 1 else None
    else:
        begin = _tag(text, place)

    if begin is None:
        return None

    space = _SPACE.match(text, begin)
    end = begin if space is None else space.end()
    return begin if _is_empty(text, end, place) else end


def _is_empty(text: str, end: int, place: str) -> bool:
    """Whether the stated answer is only white space. That white space is then the answer."""
    if place == "boxed":
        return text.startswith("}", end)
    return end == len(text) or (place != "hashes" and text.startswith("</", end))


def _tag(text: str, tag: str) -> int | None:
    starts = [match.end() for match in re.finditer(f"<{re.escape(tag)}>", text, re.IGNORECASE)]
    ends = [match.start() for match in re.finditer(f"</{re.escape(tag)}>", text, re.IGNORECASE)]
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        return None
    return starts[0]


def _box(text: str) -> int | None:
    boxes = list(_BOX.finditer(text))
    if len(boxes) != 1:
        return None

    begin = boxes[0].end()
    depth = 1
    for match in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return begin

    return None
