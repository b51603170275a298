"""Python's notation of calls that arrive in pieces: `name(first=1, second=["a", None])`.

Arguments are named, and their values are literals: texts, numbers, True, False, None (or JSON's
true, false, null), lists, tuples and dictionaries with texts as keys. They become JSON.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator

from agentevo.models.tool_calls.json_notation import checked_name, read_word
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput
from agentevo.models.tool_calls.parameters import json_text
from agentevo.models.tool_calls.text import CallText, Emit, MalformedError, Wait

MAX_DEPTH = 64
"""Lists and dictionaries within one another."""
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
    "null": "null",
}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEYWORD = re.compile(r"[^\W\d]\w*")
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\",
    "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}


def read_expression(out: ParsedOutput, call: OpenCall, *, method: str = "") -> Wait:
    """Takes a call. With `method` its name ends in that, which does not belong to it."""
    text = out.text
    name = yield from read_word(text)
    if not _NAME.fullmatch(name):
        raise text.broken("it needs the name of a tool")

    text.take_next(len(name))
    yield from _take(text, "(")
    call.set_name(checked_name(text, name.removesuffix(method)))
    seen: set[str] = set()
    yield from text.skip_space()

    while (yield from text.peek()) != ")":
        keyword = yield from read_word(text)
        if not _KEYWORD.fullmatch(keyword):
            raise text.broken("it needs arguments with names, as in name(first=1)")
        if keyword in seen:
            raise text.broken(f"it has {keyword!r} twice")

        text.take_next(len(keyword))
        yield from _take(text, "=")
        yield from text.skip_space()

        if (yield from text.peek()) == "=":
            raise text.broken("it needs a value, not a comparison")

        call.arguments(f"{', ' if seen else '{'}{json_text(keyword)}: ")
        seen.add(keyword)
        yield from read_literal(text, call.arguments)
        yield from text.skip_space()

        if (yield from text.peek()) != ")":
            yield from _take(text, ",")
            yield from text.skip_space()

    text.take_next()
    call.arguments("}" if seen else "{}")


def _take(text: CallText, wanted: str) -> Wait:
    yield from text.skip_space()
    char = yield from text.peek()
    if char != wanted:
        raise _unexpected_error(text, char, wanted)
    text.take_next()


def _unexpected_error(text: CallText, char: str, wanted: str) -> MalformedError:
    if not char:
        return text.broken("the text ends inside the call")
    return text.broken(f"it needs {wanted}, not {char!r}")


def read_literal(text: CallText, emit: Emit, depth: int = 0) -> Wait:
    """Takes a value; `emit` gets it as JSON."""
    if depth == MAX_DEPTH:
        raise text.broken(f"its arguments are nested deeper than {MAX_DEPTH} levels")

    char = yield from text.peek()
    if char in ("'", '"'):
        emit(json_text((yield from _read_text(text, char))))
    elif char == "[":
        yield from _read_list(text, emit, depth)
    elif char == "(":
        items: list[str] = []
        is_tuple = yield from _read_items(text, ")", items.append, depth)
        emit(f"[{''.join(items)}]" if is_tuple else "".join(items))
    elif char == "{":
        yield from _read_dictionary(text, emit, depth)
    else:
        word = yield from read_word(text)
        value = _WORDS.get(word) or _number(word)
        if value is None:
            raise _unexpected_error(text, char, "a value")
        text.take_next(len(word))
        emit(value)


def _read_list(text: CallText, emit: Emit, depth: int) -> Wait:
    emit("[")
    yield from _read_items(text, "]", emit, depth)
    emit("]")


def _read_items(text: CallText, end: str, emit: Emit, depth: int) -> Generator[None, None, bool]:
    """Takes a list with its brackets. True where it is empty or has a comma."""
    text.take_next()
    yield from text.skip_space()

    size = 0
    commas = 0
    while (yield from text.peek()) != end:
        if size:
            emit(", ")

        yield from read_literal(text, emit, depth + 1)
        size += 1
        yield from text.skip_space()

        if (yield from text.peek()) != end:
            yield from _take(text, ",")
            commas += 1
            yield from text.skip_space()

    text.take_next()
    return not size or commas > 0


def _read_dictionary(text: CallText, emit: Emit, depth: int) -> Wait:
    text.take_next()
    emit("{")
    yield from text.skip_space()

    size = 0
    while (char := (yield from text.peek())) != "}":
        if char not in ("'", '"'):
            raise _unexpected_error(text, char, "a text as the key")

        emit((", " if size else "") + json_text((yield from _read_text(text, char))) + ": ")
        size += 1
        yield from _take(text, ":")
        yield from text.skip_space()
        yield from read_literal(text, emit, depth + 1)
        yield from text.skip_space()

        if (yield from text.peek()) != "}":
            yield from _take(text, ",")
            yield from text.skip_space()

    text.take_next()
    emit("}")


def _number(word: str) -> str | None:
    """A number of Python as JSON."""
    if _NUMBER.fullmatch(word):
        return word

    try:
        return json_text(int(word, 0))
    except ValueError:
        pass

    try:
        return json_text(float(word))
    except ValueError:
        return None


def _read_text(text: CallText, quote: str) -> Generator[None, None, str]:
    """Takes a text in quotes, one or three on either side."""
    text.take_next()
    end = quote
    if (yield from text.starts_with(quote * 2)):
        text.take_next(2)
        end = quote * 3

    pieces: list[str] = []
    while True:
        match = _PLAIN[quote].match(text.buffer, text.at)
        assert match is not None
        if match.end() > text.at:
            pieces.append(text.take(match.end()))

        char = yield from text.peek()
        if not char:
            raise text.broken("the text ends inside a text of the call")

        if char == "\\":
            pieces.append((yield from _read_escape(text)))
        elif (yield from text.starts_with(end)):
            text.take_next(len(end))
            return "".join(pieces)
        else:
            pieces.append(text.take_next())


def _read_escape(text: CallText) -> Generator[None, None, str]:
    text.take_next()
    char = yield from text.peek()
    if not char:
        raise text.broken("the text ends inside a text of the call")

    if char in _ESCAPES:
        text.take_next()
        return _ESCAPES[char]

    if char in "01234567":
        return chr(int((yield from _read_digits(text, 3, "01234567")), 8))
    if char not in _HEXADECIMAL:
        return "\\" + text.take_next()

    text.take_next()
    size = _HEXADECIMAL[char]
    digits = yield from _read_digits(text, size, "0123456789abcdefABCDEF")
    if len(digits) < size or int(digits, 16) > sys.maxunicode:
        raise text.broken(f"it has \\{char} without {size} hexadecimal digits of a character")

    return chr(int(digits, 16))


def _read_digits(text: CallText, size: int, known: str) -> Generator[None, None, str]:
    digits = ""
    while len(digits) < size:
        char = yield from text.peek()
        if not char or char not in known:
            break
        digits += text.take_next()
    return digits
