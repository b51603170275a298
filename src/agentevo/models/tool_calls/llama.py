"""Notations of Llama and of models that call in Python.

Llama 3      {"name": "f", "parameters": {...}}, several with ";" between them, with or without
             <|python_tag|> before them; of a tool that came with the model
             <|python_tag|>f.call(a=1)
Pythonic     [f(a=1), g()] at the beginning of a line; Llama 4 may write it, or JSON, between
             <|python_start|> and <|python_end|>, LFM2 between <|tool_call_start|> and
             <|tool_call_end|>

Reads calls in Python's notation from text that arrives in pieces: `name(first=1, second=["a",
None])`.

Arguments are named, and their values are literals: texts, numbers, True, False, None (or JSON's
true, false, null), lists, tuples and dictionaries with texts as keys. They become JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import partial

from agentevo.models.tool_calls.json_notation import NUMBER, OBJECT, checked_name, read_object
from agentevo.models.tool_calls.output import (
    OpenCall,
    ParsedOutput,
    Recovery,
    read_call,
    read_calls,
    skip_mark,
)
from agentevo.models.tool_calls.parameters import json_text
from agentevo.models.tool_calls.text import SPACE, CallText, Marks, Wait, marks

MAX_DEPTH = 64
"""The deepest nesting of lists and dictionaries."""
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
    "null": "null",
}  # fmt: skip
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEYWORD = re.compile(r"[^\W\d]\w*")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3]?[0-7]{1,2}|[xuU]|[\n\\'\"abfnrtv])"
)


def read_expression(text: CallText, call: OpenCall, *, method: str = "") -> Wait:
    """Takes a call. `method`: a suffix of the written name that is not part of the tool's name."""
    name = yield from text.take_word()
    if not _NAME.fullmatch(name):
        raise text.unexpected_error("the name of a tool", name)

    yield from text.expect("(")
    call.set_name(checked_name(text, name.removesuffix(method)))

    def read_argument() -> Wait:
        keyword = yield from text.take_word()
        if not _KEYWORD.fullmatch(keyword):
            raise text.broken("it needs arguments with names, as in name(first=1)")

        yield from text.expect("=")
        yield from text.skip_space()
        if (yield from text.peek()) == "=":
            raise text.broken("it needs a value, not a comparison")

        call.begin_argument(keyword)
        call.add_arguments((yield from read_literal(text)))

    if (yield from text.take_any(")")):
        call.add_arguments("{}")
    else:
        yield from _read_items(text, ")", read_argument)


def _read_items(
    text: CallText, closing: str, read_item: Callable[[], Wait]
) -> Generator[None, None, int]:
    """Takes items separated by commas, with an optional last comma, up to the closing bracket.
    Returns the number of commas."""
    num_commas = 0
    while not (yield from text.take_any(closing)):
        yield from read_item()
        if (yield from text.expect(",", closing)) == closing:
            break
        num_commas += 1

    return num_commas


def read_literal(text: CallText, depth: int = 0) -> Generator[None, None, str]:
    """Takes a value and converts it to JSON."""
    if depth == MAX_DEPTH:
        raise text.broken(f"its arguments are nested deeper than {MAX_DEPTH} levels")

    items: list[str] = []

    def read_item() -> Wait:
        items.append((yield from read_literal(text, depth + 1)))

    def read_pair() -> Wait:
        char = yield from text.peek()
        if char not in ("'", '"'):
            raise text.unexpected_error("a text as the key")

        key = json_text((yield from _read_text(text, char)))
        yield from text.expect(":")
        yield from text.skip_space()
        value = yield from read_literal(text, depth + 1)
        items.append(f"{key}: {value}")

    match (yield from text.peek()):
        case "'" | '"' as quote:
            return json_text((yield from _read_text(text, quote)))
        case "{":
            text.take_next()
            yield from _read_items(text, "}", read_pair)
            return f"{{{', '.join(items)}}}"
        case "[":
            text.take_next()
            yield from _read_items(text, "]", read_item)
            return f"[{', '.join(items)}]"
        case "(":
            text.take_next()
            num_commas = yield from _read_items(text, ")", read_item)
            is_tuple = num_commas or not items
            return f"[{', '.join(items)}]" if is_tuple else items[0]
        case _:
            word = yield from text.take_word()
            value = _WORDS.get(word) or _number(word)
            if value is None:
                raise text.unexpected_error("a value", word)
            return value


def _number(word: str) -> str | None:
    """A number of Python as JSON."""
    if NUMBER.fullmatch(word):
        return word

    for convert in (partial(int, base=0), float):
        try:
            return json_text(convert(word))
        except ValueError:
            continue
    return None


def _read_text(text: CallText, quote: str) -> Generator[None, None, str]:
    """Takes a text in single or triple quotes."""
    text.take_next()
    end = quote
    if (yield from text.starts_with(quote * 2)):
        text.take_next(2)
        end = quote * 3

    pieces: list[str] = []
    while (mark := (yield from text.until(marks("\\", end), pieces.append))) == "\\":
        pieces.append(text.take_next())
        if (yield from text.peek()):
            pieces.append(text.take_next())

    if not mark:
        raise text.broken("the text ends inside a text of the call")

    text.take_next(len(end))
    try:
        return _ESCAPE.sub(_unescape, "".join(pieces))
    except UnicodeDecodeError as error:
        raise text.broken(f"it has an escape of no character: {error.reason}") from None


def _unescape(escape: re.Match[str]) -> str:
    return escape.group().encode().decode("unicode_escape")


PYTHON_TAG = "<|python_tag|>"
ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
BEGINS = (PYTHON_TAG, *ENDS)
EXPRESSIONS = rf"\[(?={SPACE}(?:[^\W\d]|\Z))"
_LLAMA = Marks(BEGINS, (OBJECT, EXPRESSIONS))
_PYTHONIC = Marks(BEGINS, (EXPRESSIONS,))
_UNMARKED = Recovery(before=BEGINS)
_read_expressions = partial(read_calls, read_item=read_expression, may_end_in_comma=True)


def read_llama(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    yield from _read(out, _LLAMA)


def read_pythonic(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    yield from _read(out, _PYTHONIC)


def _read(out: ParsedOutput, call_marks: Marks) -> Wait:
    text = out.text
    while mark := (yield from text.until(call_marks, out.content)):
        if mark in BEGINS:
            yield from _read_marked(out, mark)
        elif mark == "[" and text.last not in ("", "\n"):
            out.content(text.take_next())
        elif mark == "[":
            yield from _read_expressions(out, recovery=_UNMARKED, is_bare=True)
        elif (yield from read_calls(out, read_object, _UNMARKED, is_bare=True)):
            yield from _read_separated(out)


def _read_separated(out: ParsedOutput) -> Wait:
    """Reads the objects that follow one another with a semicolon between them."""
    text = out.text
    is_call = True
    while is_call:
        lead = yield from text.skip_space()
        lead += yield from text.take_any(";")
        lead += yield from text.skip_space()
        if not lead.strip() or (yield from text.peek()) != "{":
            out.content(lead)
            return
        is_call = yield from read_calls(out, read_object, _UNMARKED, lead=lead, is_bare=True)


def _read_marked(out: ParsedOutput, mark: str) -> Wait:
    text = out.text
    end = ENDS.get(mark, "")
    recovery = Recovery((end,) if end else (), BEGINS)
    lead = text.take_next(len(mark)) + (yield from text.skip_space())
    char = yield from text.peek()
    if char == "{":
        yield from read_calls(out, read_object, recovery, lead=lead)
        if not end:
            yield from _read_separated(out)
    elif char == "[":
        yield from _read_expressions(out, recovery=recovery, lead=lead)
    else:
        yield from read_call(
            out, partial(read_expression, text, method=".call"), recovery, lead=lead
        )

    if end:
        yield from skip_mark(out, end)
