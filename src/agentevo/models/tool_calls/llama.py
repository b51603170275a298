"""Notations of Llama and of models that call in Python.

Llama 3      {"name": "f", "parameters": {...}}, several with ";" between them, with or without
             <|python_tag|> before them; of a tool that came with the model
             <|python_tag|>f.call(a=1)
Pythonic     [f(a=1), g()] at the beginning of a line; Llama 4 may write it, or JSON, between
             <|python_start|> and <|python_end|>, LFM2 between <|tool_call_start|> and
             <|tool_call_end|>
"""

from __future__ import annotations

from functools import partial

from agentevo.models.tool_calls.json_notation import OBJECT, read_object
from agentevo.models.tool_calls.output import (
    ParsedOutput,
    Recovery,
    read_call,
    read_calls,
    skip_mark,
)
from agentevo.models.tool_calls.python_notation import read_expression
from agentevo.models.tool_calls.text import SPACE, Marks, Wait

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
