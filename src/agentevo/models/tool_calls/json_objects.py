"""Notations that write a call as a JSON object with name and arguments.

blocks   between two marks: Hermes and Qwen <tool_call>...</tool_call>, Nemotron
         <TOOLCALL>[...]</TOOLCALL>, Phi-4 <|tool_call|>[...]<|/tool_call|>
bare     anywhere in the text, or in a list, or in a block of code
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from agentevo.models.tool_calls.json_notation import FIRST_KEYS, read_objects
from agentevo.models.tool_calls.output import ParsedOutput, skip
from agentevo.models.tool_calls.text import CallText, Marks, Wait, marks

FENCE = "```"
OBJECT = rf"\{{(?=\s*(?:{'|'.join(FIRST_KEYS)}|\"?\Z))"
"""A brace before one of the keys that a call may begin with."""
LIST = rf"\[(?=\s*(?:{OBJECT}|\Z))"
_BARE = Marks(("```json",), (OBJECT, LIST))


def read_blocks(begin: str, end: str, out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recover = skip(through=(end,), before=(begin,))
    follow = partial(_block_goes_on, begin, end)
    while (yield from text.until(marks(begin), out.content)):
        lead = text.take_next(len(begin)) + (yield from text.skip_space())
        yield from read_objects(out, recover, lead=lead, follow=follow)


def _block_goes_on(begin: str, end: str, text: CallText) -> Generator[None, None, bool]:
    """Whether another object follows in the same block. Its end may be missing at the end of the
    text and before the next block."""
    yield from text.skip_space()
    mark = yield from text.starts_with(begin, end, "{")
    if mark == end:
        text.take_next(len(end))
    elif not mark and (yield from text.peek()):
        raise text.broken("there is text behind its JSON")
    return mark == "{"


def read_json(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    while mark := (yield from text.until(_BARE, out.content)):
        if mark in ("{", "["):
            yield from read_objects(out, skip(), bare=True)
            continue

        lead = text.take_next(len(mark)) + (yield from text.skip_space())
        if (yield from text.peek()) not in ("{", "["):
            out.content(lead)
        elif (yield from read_objects(out, skip(), lead=lead, bare=True)):
            yield from _end_fence(text)


def _end_fence(text: CallText) -> Wait:
    yield from text.skip_space()
    if (yield from text.starts_with(FENCE)):
        text.take_next(len(FENCE))
