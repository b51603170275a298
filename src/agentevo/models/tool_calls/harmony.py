"""Harmony, the notation of GPT-OSS: messages with a channel and a recipient.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>

The generation prompt ends in `<|start|>assistant`, so the first message begins after it. Analysis
is reasoning, a message with a recipient is a call, and everything else is content. A message ends
at `<|end|>`, `<|return|>` or `<|call|>`, at the next `<|start|>`, or at the end of the text.
"""

from __future__ import annotations

import re
from functools import partial

from agentevo.models.tool_calls.json_notation import checked_name, read_arguments
from agentevo.models.tool_calls.output import (
    OpenCall,
    ParsedOutput,
    Recovery,
    read_call,
    read_end,
    skip_mark,
)
from agentevo.models.tool_calls.text import CallText, Wait, marks

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER = (START, CHANNEL, "<|constrain|>", MESSAGE, "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_KNOWN = re.compile(
    r"<\|start\|>(?:assistant\b)?|<\|channel\|>\s*(?:(?:analysis|commentary|final)\b)?"
    r"|<\|constrain\|>|\bjson\b|\bto=[^\s<]*"
)
"""The channels that a header must name."""
_CUT_OFF = re.compile(r"<\|channel\|>\s*\w*\Z")


def read_harmony(out: ParsedOutput, *, calls: bool = True) -> Wait:
    """Reads the text to its end. Without `calls`, a message with a recipient is content."""
    text = out.text
    while True:
        space = yield from text.skip_space()
        if not (yield from text.peek()):
            out.content(space)
            return

        if (yield from text.starts_with(*_HEADER)):
            yield from _read_message(out, space, calls)
        else:  # no header: the model continues without one
            out.content(space)
            yield from text.until(marks(START, CHANNEL, *ENDS), out.content)
            yield from skip_mark(out, *ENDS)


def _read_message(out: ParsedOutput, space: str, calls: bool) -> Wait:
    text = out.text
    pieces = [space]
    if (yield from text.starts_with(START)):
        pieces.append(text.take_next(len(START)))

    mark = yield from text.until(marks(MESSAGE, START, *ENDS), pieces.append)
    header = "".join(pieces)
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)

    if recipient is not None and recipient.group(1) != "assistant" and calls:
        body = partial(_read_call, text, recipient.group(1).removeprefix("functions."))
        yield from read_call(out, body, Recovery(ENDS, (START,)), lead=header)
        return

    unknown = _KNOWN.sub("", header if mark else _CUT_OFF.sub("", header))
    out.cut()
    out.content(unknown if unknown.strip() else "")
    if mark == MESSAGE:
        text.take_next(len(MESSAGE))
        is_thought = channel is not None and channel.group(1) == "analysis" and recipient is None
        if is_thought:
            out.new_thought()
        else:
            out.new_message()
        yield from text.until(marks(START, *ENDS), out.reasoning if is_thought else out.content)

    yield from skip_mark(out, *ENDS)


def _read_call(text: CallText, name: str, call: OpenCall) -> Wait:
    call.set_name(checked_name(text, name))
    yield from text.expect(MESSAGE)
    yield from read_arguments(text, call)
    yield from read_end(text, ENDS, (START,))
