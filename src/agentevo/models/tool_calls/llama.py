"""Notations of Llama and of models that call in Python.

Llama 3      {"name": "f", "parameters": {...}}, several with ";" between them, with or without
             <|python_tag|> before them; of a tool that came with the model
             <|python_tag|>f.call(a=1)
Pythonic     [f(a=1), g()] at the beginning of a line; Llama 4 may write it, or JSON, between
             <|python_start|> and <|python_end|>, LFM2 between <|tool_call_start|> and
             <|tool_call_end|>
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from agentevo.models.tool_calls.json_notation import read_objects
from agentevo.models.tool_calls.json_objects import OBJECT
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recover, read_call, skip
from agentevo.models.tool_calls.python_notation import read_expression
from agentevo.models.tool_calls.text import CallText, Marks, Wait

PYTHON_TAG = "<|python_tag|>"
ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
BEGINS = (PYTHON_TAG, *ENDS)
EXPRESSIONS = r"\[(?=\s*(?:[^\W\d]|\Z))"
_LLAMA = Marks(BEGINS, (OBJECT, EXPRESSIONS))
_PYTHONIC = Marks(BEGINS, (EXPRESSIONS,))


def read_llama(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    yield from _read(out, _LLAMA)


def read_pythonic(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    yield from _read(out, _PYTHONIC)


def _read(out: ParsedOutput, wanted: Marks) -> Wait:
    text = out.text
    while mark := (yield from text.until(wanted, out.content)):
        if mark in BEGINS:
            yield from _read_marked(out, mark)
        elif mark == "[" and text.last not in ("", "\n"):
            out.content(text.take_next())
        elif mark == "[":
            yield from _read_expressions(out, skip(before=BEGINS), bare=True)
        elif (yield from read_objects(out, skip(before=BEGINS), bare=True)):
            yield from _read_separated(out)


def _read_separated(out: ParsedOutput) -> Wait:
    """Reads the objects that follow one another with a semicolon between them."""
    text = out.text
    while True:
        lead = yield from text.skip_space()
        if (yield from text.peek()) != ";":
            out.content(lead)
            return

        lead += text.take_next() + (yield from text.skip_space())
        if (yield from text.peek()) != "{":
            out.content(lead)
            return

        if not (yield from read_objects(out, skip(before=BEGINS), lead=lead, bare=True)):
            return


def _read_marked(out: ParsedOutput, mark: str) -> Wait:
    text = out.text
    end = ENDS.get(mark, "")
    recover = skip(through=(end,) if end else (), before=BEGINS)
    lead = text.take_next(len(mark)) + (yield from text.skip_space())
    char = yield from text.peek()
    if char == "{":
        yield from read_objects(out, recover, lead=lead)
        if not end:
            yield from _read_separated(out)
    elif char == "[":
        yield from _read_expressions(out, recover, lead=lead)
    else:
        body = partial(read_expression, out, method=".call")
        yield from read_call(out, body, recover, lead=lead)

    if end:
        yield from _skip_end(out, end)


def _skip_end(out: ParsedOutput, end: str) -> Wait:
    space = yield from out.text.skip_space()
    if (yield from out.text.starts_with(end)):
        out.text.take_next(len(end))
        out.cut()
    else:
        out.content(space)


def _read_expressions(
    out: ParsedOutput, recover: Recover, *, lead: str = "", bare: bool = False
) -> Wait:
    text = out.text
    first = True
    separator = ""

    def body(call: OpenCall) -> Wait:
        nonlocal separator
        if first:
            text.take_next()
        yield from text.skip_space()
        yield from read_expression(out, call)
        separator = yield from _separator(text)

    while (yield from read_call(out, body, recover, lead=lead, bare=bare and first)):
        if not separator:
            return
        first = False
        lead = separator


def _separator(text: CallText) -> Generator[None, None, str]:
    """Takes the comma before the next call of a list, or the list's end, for which it is ""."""
    yield from text.skip_space()
    char = yield from text.peek()
    comma = ""
    if char == ",":
        comma = text.take_next() + (yield from text.skip_space())
        char = yield from text.peek()
        if char != "]":
            return comma

    if char != "]":
        raise text.broken(
            f"it needs a comma or ], not {char!r}" if char else "the text ends inside the list"
        )

    text.take_next()
    return ""
