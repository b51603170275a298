"""Reads calls that are JSON objects with name and arguments, from JSON that arrives in pieces.

blocks   between two marks: Hermes and Qwen <tool_call>...</tool_call>, Nemotron
         <TOOLCALL>[...]</TOOLCALL>, Phi-4 <|tool_call|>[...]<|/tool_call|>
bare     anywhere in the text, or in a list, or in a block of code

Strict JSON, as every client's parser reads it: no line breaks inside strings, no NaN, nothing
nested deeper than MAX_DEPTH. The exact text of arguments is passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recovery, read_calls, read_end
from agentevo.models.tool_calls.text import SPACE, CallText, Emit, Marks, Wait, ignore, marks

MAX_DEPTH = 100
"""The deepest nesting of lists and objects. It is far below the limits of clients' parsers."""
FENCE = "```"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_STRING_MARKS = Marks((), (r'["\\\x00-\x1f]',))
_ESCAPES = Marks((), (r'\\["\\/bfnrt]', r"\\u[0-9a-fA-F]{4}"))
_PARTS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}
_KEYS_BESIDE = ("type", "id")
"""The other keys that a call without a mark may have."""
_FIRST_KEYS = ('"n', '"a', '"p', '"t', '"i')
"""The beginnings of the keys of such a call. An object that begins otherwise is given up
immediately, so that the result does not depend on how much text had arrived with its brace."""
OBJECT = rf"\{{(?={SPACE}(?:{'|'.join(_FIRST_KEYS)}|\"?\Z))"
"""A brace before one of the keys that a call may begin with."""
_LIST = rf"\[(?={SPACE}(?:{OBJECT}|\Z))"
_BARE = Marks(("```json",), (OBJECT, _LIST))


def read_value(text: CallText, emit: Emit) -> Wait:
    """Takes one value. `emit` gets its exact text."""
    brackets: list[str] = []
    """The closing brackets of the open lists and objects."""
    while True:
        char = yield from _next_char(text, emit)
        if char in ("{", "["):
            if len(brackets) == MAX_DEPTH:
                raise text.broken(f"its JSON is nested deeper than {MAX_DEPTH} levels")

            emit(text.take_next())
            brackets.append("}" if char == "{" else "]")
            if (yield from _next_char(text, emit)) != brackets[-1]:
                yield from _read_key(text, emit, brackets[-1])
                continue
            emit(text.take_next())
            brackets.pop()
        elif char == '"':
            yield from _read_string(text, emit)
        else:
            word = yield from text.take_word()
            if word not in _LITERALS and not NUMBER.fullmatch(word):
                raise text.unexpected_error("a value", word)
            emit(word)

        while brackets and (yield from _next_char(text, emit)) == brackets[-1]:
            emit(text.take_next())
            brackets.pop()

        if not brackets:
            return
        emit((yield from text.expect(",", expected=f"a comma or {brackets[-1]}")))
        yield from _read_key(text, emit, brackets[-1])


def _next_char(text: CallText, emit: Emit) -> Generator[None, None, str]:
    """The next character after white space, or "" at the end."""
    emit((yield from text.skip_space()))
    return (yield from text.peek())


def _read_key(text: CallText, emit: Emit, closing: str) -> Wait:
    """Takes the text before a value: its key, if it is in an object."""
    if closing == "]":
        return
    if (yield from _next_char(text, emit)) != '"':
        raise text.unexpected_error("a key")

    yield from _read_string(text, emit)
    yield from _next_char(text, emit)
    emit((yield from text.expect(":", expected="a colon")))


def _read_string(text: CallText, emit: Emit) -> Wait:
    """Takes a string, which begins here."""
    emit(text.take_next())
    while (mark := (yield from text.until(_STRING_MARKS, emit))) == "\\":
        escape = yield from text.look_for(_ESCAPES)
        if not escape:
            raise text.broken("its JSON has a backslash that begins no escape: write two")
        emit(text.take_next(len(escape)))

    if not mark:
        raise text.broken("the text ends inside a string of the call")
    if mark != '"':
        raise text.broken(f"its JSON has {mark!r} inside a string: write an escape for it")
    emit(text.take_next())


def _read_text(text: CallText, expected: str) -> Generator[None, None, str]:
    if (yield from _next_char(text, ignore)) != '"':
        raise text.unexpected_error(expected)
    pieces: list[str] = []
    yield from _read_string(text, pieces.append)
    return str(json.loads("".join(pieces)))


def read_object(text: CallText, call: OpenCall) -> Wait:
    """Takes `{"name": ..., "arguments": {...}}`, or `parameters` instead of `arguments`, in any
    order and among other keys."""
    seen_parts: set[str] = set()
    yield from text.expect("{", expected="an object with name and arguments")
    yield from text.skip_space()
    if call.is_bare and not (yield from text.starts_with(*_FIRST_KEYS)):
        raise text.broken("it does not begin as a call")

    mark = yield from text.take_any("}")
    while mark != "}":
        key = yield from _read_text(text, "a key")
        yield from text.expect(":", expected="a colon")

        part = _PARTS.get(key, "")
        if part in seen_parts:
            raise text.broken(f"it has {part} twice")

        if part == "name":
            name = yield from _read_text(text, "a text as the name")
            call.set_name(checked_name(text, name))
        elif part == "arguments":
            yield from read_arguments(text, call)
        elif call.is_bare and not call.is_call and key not in _KEYS_BESIDE:
            raise text.broken(f"it has {key!r}")
        else:
            yield from read_value(text, ignore)

        seen_parts |= {part} - {""}
        mark = yield from text.expect(",", "}", expected="a comma or }")

    if not call.name:
        raise text.broken("it has no name")
    if not call.is_call:
        raise text.broken("it has no arguments")


def read_arguments(text: CallText, call: OpenCall) -> Wait:
    """Takes a call's arguments, which must be an object."""
    if (yield from _next_char(text, ignore)) != "{":
        raise text.unexpected_error("an object as the arguments")
    yield from read_value(text, call.add_arguments)


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


def read_blocks(begin: str, end: str, out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recovery = Recovery((end,), (begin,))

    def goes_on(text: CallText) -> Generator[None, None, bool]:
        return (yield from read_end(text, (end,), (begin, "{"))) == "{"

    while (yield from text.until(marks(begin), out.content)):
        lead = text.take_next(len(begin)) + (yield from text.skip_space())
        yield from read_calls(out, read_object, recovery, lead=lead, goes_on=goes_on)


def read_json(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    while mark := (yield from text.until(_BARE, out.content)):
        if mark in ("{", "["):
            yield from read_calls(out, read_object, Recovery(), is_bare=True)
            continue

        lead = text.take_next(len(mark)) + (yield from text.skip_space())
        if (yield from text.peek()) not in ("{", "["):
            out.content(lead)
        elif (yield from read_calls(out, read_object, Recovery(), lead=lead, is_bare=True)):
            yield from text.take_any(FENCE)
