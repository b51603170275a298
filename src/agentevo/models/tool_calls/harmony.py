"""Harmony, the notation of GPT-OSS: messages with a channel and a recipient.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>

The generation prompt ends in `<|start|>assistant`, so the first message begins behind that.
Analysis is reasoning; a message with a recipient is a call; everything else is content. A message
ends at `<|end|>`, `<|return|>` or `<|call|>`, at the next `<|start|>`, or with the text.
"""

from __future__ import annotations

import re
from functools import partial

from agentevo.models.tool_calls.json_notation import checked_name, read_arguments
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, read_call, skip
from agentevo.models.tool_calls.text import Wait, marks

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
"""What a header has to say."""
_CUT_OFF = re.compile(r"<\|channel\|>\s*\w*\Z")


def read_harmony(out: ParsedOutput, *, calls: bool = True) -> Wait:
    """Reads the text to its end. Without `calls` a message with a recipient is content as well."""
    text = out.text
    while True:
        space = yield from text.skip_space()
        if not (yield from text.peek()):
            out.content(space)
            return

        if (yield from text.starts_with(*_HEADER)):
            yield from _read_message(out, space, calls)
        else:  # no header: the model goes on without one
            out.content(space)
            yield from text.until(marks(START, CHANNEL, *ENDS), out.content)
            yield from _skip_end(out)


def _read_message(out: ParsedOutput, space: str, calls: bool) -> Wait:
    text = out.text
    pieces = [space]
    if (yield from text.starts_with(START)):
        pieces.append(text.take_next(len(START)))

    mark = yield from text.until(marks(MESSAGE, START, *ENDS), pieces.append)
    header = "".join(pieces)
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    rest = _KNOWN.sub("", header if mark else _CUT_OFF.sub("", header))

    if recipient is not None and recipient.group(1) != "assistant" and calls:
        body = partial(_call, out, recipient.group(1).removeprefix("functions."))
        yield from read_call(out, body, skip(through=ENDS, before=(START,)), lead=header)
        return

    out.cut()
    out.content(rest if rest.strip() else "")
    if mark != MESSAGE:
        yield from _skip_end(out)
        return

    text.take_next(len(MESSAGE))
    thought = channel is not None and channel.group(1) == "analysis" and recipient is None
    if thought:
        out.new_thought()
    else:
        out.new_message()

    yield from text.until(marks(START, *ENDS), out.reasoning if thought else out.content)
    yield from _skip_end(out)


def _skip_end(out: ParsedOutput) -> Wait:
    mark = yield from out.text.starts_with(*ENDS)
    if mark:
        out.text.take_next(len(mark))
        out.cut()


def _call(out: ParsedOutput, name: str, call: OpenCall) -> Wait:
    text = out.text
    call.set_name(checked_name(text, name))
    if not (yield from text.starts_with(MESSAGE)):
        raise text.broken("the text ends inside the call")

    text.take_next(len(MESSAGE))
    yield from read_arguments(text, call)
    yield from text.skip_space()

    mark = yield from text.starts_with(START, *ENDS)
    if mark in ENDS:
        text.take_next(len(mark))
    elif not mark and (yield from text.peek()):
        raise text.broken("there is text behind its arguments")
