"""JSON that arrives in pieces: values whose exact text is passed on, and calls written as objects.

Strict JSON, as every client's parser reads it: no line breaks inside strings, no NaN, nothing
nested deeper than MAX_DEPTH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recover, read_call
from agentevo.models.tool_calls.text import CallText, Emit, MalformedError, Wait, ignore

MAX_DEPTH = 100
"""Lists and objects within one another: far below where clients' parsers give up."""
MAX_SCALAR = 1000
"""Characters of a number."""
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}
_KEYS_BESIDE = ("type", "id")
"""Other keys that a call without a mark may have."""
FIRST_KEYS = ('"n', '"a', '"p', '"t', '"i')
"""How the keys of such a call begin. What begins otherwise is left at once: whether there was more
text to look at when its brace came must make no difference."""
_FIRST_VALUE, _VALUE, _FIRST_KEY, _KEY, _COLON, _AFTER = range(6)
_EXPECTED = ("a value or ]", "a value", "a key or }", "a key", "a colon", "a comma or the end")


def next_char(text: CallText, emit: Emit) -> Generator[None, None, str]:
    """The character after JSON's white space, or "" at the end."""
    while True:
        match = _SPACE.match(text.buffer, text.at)
        assert match is not None
        if match.end() > text.at:
            emit(text.take(match.end()))
        if text.at < len(text.buffer):
            return text.buffer[text.at]
        if text.ended:
            return ""

        yield


def read_value(text: CallText, emit: Emit) -> Wait:
    """Takes one value; `emit` gets its exact text."""
    stack: list[str] = []
    state = _VALUE
    while True:
        if stack or state != _AFTER:
            char = yield from next_char(text, emit)
        else:
            return

        if state in (_VALUE, _FIRST_VALUE) and char and char in "{[":
            if len(stack) == MAX_DEPTH:
                raise text.broken(f"its JSON is nested deeper than {MAX_DEPTH} levels")
            emit(text.take_next())
            stack.append(char)
            state = _FIRST_KEY if char == "{" else _FIRST_VALUE
        elif state in (_FIRST_VALUE, _FIRST_KEY, _AFTER) and stack and char == _CLOSES[stack[-1]]:
            emit(text.take_next())
            stack.pop()
            state = _AFTER
        elif state in (_VALUE, _FIRST_VALUE):
            yield from _read_scalar(text, char, emit, _EXPECTED[state])
            state = _AFTER
        elif state in (_KEY, _FIRST_KEY) and char == '"':
            yield from read_string(text, emit)
            state = _COLON
        elif (state == _COLON and char == ":") or (state == _AFTER and char == ","):
            emit(text.take_next())
            state = _VALUE if char == ":" or stack[-1] == "[" else _KEY
        else:
            raise unexpected_error(text, char, _EXPECTED[state])


_CLOSES = {"{": "}", "[": "]"}


def unexpected_error(text: CallText, char: str, wanted: str) -> MalformedError:
    if not char:
        return text.broken("the text ends inside the call")
    return text.broken(f"its JSON needs {wanted}, not {char!r}")


def read_string(text: CallText, emit: Emit) -> Wait:
    """Takes a string, which begins here."""
    emit(text.take_next())
    while True:
        match = _PLAIN.match(text.buffer, text.at)
        assert match is not None
        if match.end() > text.at:
            emit(text.take(match.end()))

        char = yield from text.peek()
        if char == '"':
            emit(text.take_next())
            return

        if char == "\\":
            yield from _read_escape(text, emit)
        elif not char:
            raise text.broken("the text ends inside a string of the call")
        elif char < " ":
            raise text.broken(f"its JSON has {char!r} inside a string: write an escape for it")


def _read_escape(text: CallText, emit: Emit) -> Wait:
    emit(text.take_next())
    char = yield from text.peek()
    if char != "u":
        if not char or char not in '"\\/bfnrt':
            raise text.broken("its JSON has a backslash that begins no escape: write two")
        emit(text.take_next())
        return

    emit(text.take_next())
    for _ in range(4):
        char = yield from text.peek()
        if not char or char not in "0123456789abcdefABCDEF":
            raise text.broken("its JSON has \\u without four hexadecimal digits")
        emit(text.take_next())


def _read_scalar(text: CallText, char: str, emit: Emit, wanted: str) -> Wait:
    if char == '"':
        yield from read_string(text, emit)
        return
    word = yield from read_word(text)
    if word not in _LITERALS and not _NUMBER.fullmatch(word):
        raise unexpected_error(text, char, wanted)
    emit(text.take_next(len(word)))


def read_word(text: CallText) -> Generator[None, None, str]:
    """The letters, digits, signs and dots that come next, which are not taken."""
    while True:
        match = _WORD.match(text.buffer, text.at)
        word = match.group() if match else ""
        if len(word) > MAX_SCALAR:
            raise text.broken(f"it has a number or word of more than {MAX_SCALAR} characters")
        if text.at + len(word) < len(text.buffer) or text.ended:
            return word
        yield


def read_object(out: ParsedOutput, call: OpenCall, *, bare: bool = False) -> Wait:
    """Takes `{"name": ..., "arguments": {...}}`, or with `parameters`, in any order and among
    other keys."""
    text = out.text
    seen: set[str] = set()
    yield from _take(text, "{", "an object with name and arguments")
    char = yield from next_char(text, ignore)

    if bare and not (yield from text.starts_with(*FIRST_KEYS)):
        raise text.broken("it does not begin as a call")

    while char != "}":
        key = yield from _read_text(text, char, "a key")
        yield from _take(text, ":", "a colon")

        part = _KEYS.get(key)
        if part in seen:
            raise text.broken(f"it has {part} twice")

        char = yield from next_char(text, ignore)
        if part == "name":
            name = yield from _read_text(text, char, "a text as the name")
            call.set_name(checked_name(text, name))
        elif part == "arguments":
            yield from read_arguments(text, call)
        elif bare and not call.is_call and key not in _KEYS_BESIDE:
            raise text.broken(f"it has {key!r}")
        else:
            yield from read_value(text, ignore)

        if part is not None:
            seen.add(part)

        char = yield from next_char(text, ignore)
        if char != "}":
            yield from _take(text, ",", "a comma or }")
            char = yield from next_char(text, ignore)
            if char != '"':
                raise unexpected_error(text, char, "a key")

    text.take_next()
    if not call.name:
        raise text.broken("it has no name")
    if not call.is_call:
        raise text.broken("it has no arguments")


def read_arguments(text: CallText, call: OpenCall) -> Wait:
    """Takes a call's arguments, which must be an object."""
    char = yield from next_char(text, ignore)
    if char != "{":
        raise unexpected_error(text, char, "an object as the arguments")
    yield from read_value(text, call.arguments)


def checked_name(text: CallText, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise text.broken("its name is no text in Unicode") from None

    strange = re.search(r"""[\s<>{}"]""", name)
    if strange is not None:
        raise text.broken(f"its name has {strange.group()!r} in it")
    if not name:
        raise text.broken("its name is empty")

    return name


def _take(text: CallText, wanted: str, what: str) -> Wait:
    char = yield from next_char(text, ignore)
    if char != wanted:
        raise unexpected_error(text, char, what)
    text.take_next()


def _read_text(text: CallText, char: str, what: str) -> Generator[None, None, str]:
    if char != '"':
        raise unexpected_error(text, char, what)
    pieces: list[str] = []
    yield from read_string(text, pieces.append)
    return str(json.loads("".join(pieces)))


Follow = Callable[[CallText], Generator[None, None, bool]]
"""Reads what follows the last call of a block: True for another call. Raises MalformedError."""


def read_objects(
    out: ParsedOutput,
    recover: Recover,
    *,
    lead: str = "",
    bare: bool = False,
    follow: Follow | None = None,
) -> Generator[None, None, bool]:
    """Reads calls: an object, or a list of them. False where the first is none."""
    text = out.text
    in_list = False
    more = True
    first = True

    def body(call: OpenCall) -> Wait:
        nonlocal in_list, more
        more = False
        if first and (yield from next_char(text, ignore)) == "[":
            text.take_next()
            in_list = True

        yield from read_object(out, call, bare=bare and first)
        if in_list:
            char = yield from next_char(text, ignore)
            if char == ",":
                text.take_next()
                more = True
                return

            if char != "]":
                raise unexpected_error(text, char, "a comma or ]")

            text.take_next()
            in_list = False

        if follow is not None:
            more = yield from follow(text)

    while more:
        whole = yield from read_call(out, body, recover, lead=lead, bare=bare and first)
        if not whole:
            return not first
        first = False
        lead = "," if in_list else ""

    return True
