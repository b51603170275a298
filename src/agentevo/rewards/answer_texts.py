"""Answers in texts: finds the final answer in a reply, and normalises texts for comparison.

A place is one of

    auto        the first of answer, boxed and hashes that the reply has, else the whole reply; a
                last box that is not closed is not an answer
    whole       the whole reply
    boxed       inside the last \\boxed{...}, else the last \\fbox{...}; braces may be nested
    hashes      after the last ####, on its line
    number      the last number
    json:KEY    the value of a key in the last JSON of the reply; json:KEY.0.KEY is the value of a
                nested key; json is the whole JSON
    regex:...   the first group of the last match of a regular expression, else the whole match
    TAG         any other name: inside the last <TAG>...</TAG>

Every search takes time linear in the text. A model that is trained to get a reward may write
anything, and a reply of a megabyte of open braces must not cost more than any other reply.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any

import pydantic

from agentevo.rewards.numerals import last_numeral
from agentevo.rewards.patterns import Pattern
from agentevo.types import Task

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
ANSWER_SCHEMA = "answer_schema"
"""The key in a task's metadata with the place of the answer in a reply. It overrides the recipe's
rewards."""
_INDEX = re.compile(r"[0-9]{1,9}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SPACE = re.compile(r"\s*")
_BOX = re.compile(r"\\boxed\s{0,9}\{")
_FBOX = re.compile(r"\\fbox\s{0,9}\{")
_JSON_DECODER = json.JSONDecoder()
_JSON_START = re.compile(r"""\{(?=\s{0,99}["}])|\[(?=\s{0,99}[]\[{"0-9tfn-])""")
"""The start of an object or array, unlike most braces of TeX."""
MAX_JSON_TRIES = 2000
"""The maximum number of failed attempts to parse a JSON value in a text."""
MAX_JSON_READINGS = 20
"""The maximum number of characters that these attempts read, as a multiple of the text's length."""


def check_place(place: str) -> str:
    """Returns `place` unchanged. Raises ValueError for an unknown place."""
    _finder_of(place)
    return place


Place = Annotated[str, pydantic.AfterValidator(check_place)]
"""Where a reply states its answer: the module's docstring lists the places."""


def place_of(task: Task, default: str) -> str:
    """The place of the answer in replies to a task: the task's `answer_schema`, else the
    default."""
    return str(task.metadata.get(ANSWER_SCHEMA) or default)


def find_answer(text: str, place: str) -> str | None:
    """The answer that a text states at a place, or None if the place has no answer. Raises
    TimeoutError for a regular expression that does not end."""
    return _finder_of(place)(text)


@lru_cache(maxsize=1000)
def _finder_of(place: str) -> Callable[[str], str | None]:
    if place in _FINDERS:
        return _FINDERS[place]

    kind, colon, detail = place.partition(":")
    if kind == "regex" and detail:
        return _strip_result(Pattern(detail).last)

    if kind == "json" and bool(colon) == bool(detail):
        keys = detail.split(".") if detail else []
        return lambda text: _in_json(text, keys)

    if not _TAG_NAME.fullmatch(place):
        raise ValueError(
            f"{place[:200]!r} is not a place of an answer: give {', '.join(_FINDERS)}, json:KEY, "
            "regex:PATTERN, or the name of an XML tag such as answer"
        )

    if place == "answer_tag":
        raise ValueError("the tag <answer> is written `answer`: give the name of the tag itself")

    return lambda text: _in_tag(text, place)


def _in_tag(text: str, tag: str) -> str | None:
    """The text in the last pair of tags. Of nested pairs, the innermost counts."""
    name = re.escape(tag)
    ends = [match.start() for match in re.finditer(f"</{name}>", text, re.IGNORECASE)]
    if not ends:
        return None

    starts = [
        match.end()
        for match in re.finditer(f"<{name}>", text, re.IGNORECASE)
        if match.end() <= ends[-1]
    ]
    if not starts:
        return None
    return text[starts[-1] : next(end for end in ends if end >= starts[-1])].strip()


def _in_box(text: str) -> str | None:
    """The text in the last box. None for a box that is not closed. Printed braces (\\{) don't
    count."""
    boxes = list(_BOX.finditer(text)) or list(_FBOX.finditer(text))
    if not boxes:
        return None

    start = boxes[-1].end()
    end = _end_of_box(text, start)
    return None if end is None else text[start:end].strip()


def _end_of_box(text: str, start: int) -> int | None:
    """The position of the brace that closes a box. None for a box that is not closed."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()

    return None


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def _in_auto(text: str) -> str | None:
    answer = _in_tag(text, "answer")
    if answer is not None:
        return answer
    if _BOX.search(text) or _FBOX.search(text):
        return _in_box(text)  # None for a box that was cut off, even if there is an earlier box

    answer = _after_hashes(text)
    return text.strip() if answer is None else answer


def _last_number(text: str) -> str | None:
    numeral = last_numeral(text)
    return None if numeral is None else numeral[0]


def _in_json(text: str, keys: list[str]) -> str | None:
    """The value of a nested key in the last JSON: a text unchanged, any other value as JSON."""
    value = _last_json(text)
    for key in keys:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None

    if value is None:
        return None

    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _last_json(text: str) -> Any:
    """The last JSON object or array in a text. None if there is none."""
    last = deque(jsons_in(text), maxlen=1)
    return last[0] if last else None


def jsons_in(text: str) -> Iterator[Any]:
    """The JSON objects and arrays in a text, in order, without nested ones. If too many attempts
    to parse fail, the rest of the text is ignored."""
    position = 0
    tries = 0
    budget = MAX_JSON_READINGS * len(text)
    while tries < MAX_JSON_TRIES and budget > 0 and (start := _JSON_START.search(text, position)):
        try:
            value, position = _JSON_DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            position = start.end()
            tries += 1
            budget -= _end_of_try(error, len(text)) - start.start()
        else:
            yield value


def _end_of_try(error: Exception, length: int) -> int:
    """An upper bound of the position up to which a failed attempt read the text."""
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith("Unterminated"):
        return length
    return error.pos


def _strip_result(find: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def find_stripped(text: str) -> str | None:
        answer = find(text)
        return None if answer is None else answer.strip()

    return find_stripped


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "auto": _in_auto,
    "whole": str.strip,
    "boxed": _in_box,
    "hashes": _after_hashes,
    "number": _last_number,
}


def check_opening(place: str) -> str:
    """Returns the place. Raises ValueError for a place at which no other answer can replace the
    stated one, because it has no single beginning."""
    if place in ("auto", "whole", "number", "json") or not _TAG_NAME.fullmatch(place):
        raise ValueError(
            f"{place[:200]!r} is not a place where another answer can be put: give the name of an "
            "XML tag such as answer, boxed, or hashes"
        )
    return place


def opening_text(place: str) -> str:
    """The text before an answer at that place."""
    return {"boxed": "\\boxed{", "hashes": "####"}.get(place, f"<{place}>")


def find_opening(text: str, place: str) -> int | None:
    """The index of the answer's first character, after white space that belongs to the opening.
    None for a reply that does not state exactly one answer there: of two, it is not clear which
    counts."""
    if place == "hashes":
        starts = [match.end() for match in re.finditer("####", text)]
        is_closed = True
    elif place == "boxed":
        starts = [match.end() for match in _BOX.finditer(text)]
        is_closed = len(starts) == 1 and _end_of_box(text, starts[0]) is not None
    else:
        name = re.escape(place)
        starts = [match.end() for match in re.finditer(f"<{name}>", text, re.IGNORECASE)]
        ends = [match.start() for match in re.finditer(f"</{name}>", text, re.IGNORECASE)]
        is_closed = len(ends) == 1 and starts[:1] <= ends

    if len(starts) != 1 or not is_closed:
        return None

    space = _SPACE.match(text, starts[0])
    end = starts[0] if space is None else space.end()
    return starts[0] if _is_empty(text, end, place) else end


def _is_empty(text: str, end: int, place: str) -> bool:
    """Whether the stated answer is only white space. That white space is then the answer."""
    if place == "boxed":
        return text.startswith("}", end)
    return end == len(text) or (place != "hashes" and text.startswith("</", end))


def normalise_text(text: str, ignore_case: bool) -> str:
    """The text with white space as single blanks, and without a full stop at the end."""
    text = " ".join(text.split()).rstrip(".").rstrip()
    return text.casefold() if ignore_case else text


def references(answer: Any) -> list[Any]:
    """The right answers of a task: the elements if `answer` is a list, else `answer` alone."""
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]
