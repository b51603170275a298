"""Notations that write the tool's name between marks, and its arguments as JSON behind it.

Mistral    [TOOL_CALLS]name[ARGS]{...}, and the older [TOOL_CALLS] [{"name": ..., ...}, ...]
DeepSeek   V3 and R1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then
           the arguments as a block of code, <｜tool▁call▁end｜>...<｜tool▁calls▁end｜>;
           V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
Kimi K2    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0
           <|tool_call_argument_begin|>{...}<|tool_call_end|>...<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from functools import partial

from agentevo.models.tool_calls.json_notation import checked_name, read_arguments, read_objects
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, read_call, skip
from agentevo.models.tool_calls.text import Wait, marks

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


def read_mistral(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recover = skip(before=(TOOL_CALLS,))
    while (yield from text.until(marks(TOOL_CALLS), out.content)):
        lead = text.take_next(len(TOOL_CALLS)) + (yield from text.skip_space())
        if (yield from text.peek()) in ("[", "{"):
            yield from read_objects(out, recover, lead=lead)
        else:
            yield from read_call(out, partial(_mistral_call, out), recover, lead=lead)


def _mistral_call(out: ParsedOutput, call: OpenCall) -> Wait:
    text = out.text
    name, mark = yield from text.collect("a call", ARGS, CALL_ID, "{", TOOL_CALLS)
    call.set_name(checked_name(text, name.strip()))

    if mark == CALL_ID:
        _, mark = yield from text.collect("a call", ARGS, TOOL_CALLS)
    if mark == ARGS:
        text.take_next(len(mark))

    yield from read_arguments(text, call)


CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
FENCE = "```"


def read_deepseek(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recover = skip(through=(CALL_END,), before=(CALL_BEGIN, CALLS_END))
    wanted = marks(CALLS_BEGIN, CALLS_END, CALL_BEGIN)
    while mark := (yield from text.until(wanted, out.content)):
        text.take_next(len(mark))
        out.cut()
        if mark == CALL_BEGIN:
            yield from read_call(out, partial(_deepseek_call, out), recover, lead=mark)


def _deepseek_call(out: ParsedOutput, call: OpenCall) -> Wait:
    text = out.text
    name, mark = yield from text.collect("a call", SEP, CALL_END, CALL_BEGIN, CALLS_END)
    if mark == SEP:
        text.take_next(len(SEP))
        yield from text.skip_space()
        if (yield from text.peek()) not in ("{", "`"):
            _checked_kind(out, name)
            name, _ = yield from text.collect(
                "a call", "\n", FENCE, "{", CALL_END, CALL_BEGIN, CALLS_BEGIN, CALLS_END
            )

    call.set_name(checked_name(text, name.strip()))
    yield from text.skip_space()
    yield from _skip_fence(out)
    yield from read_arguments(text, call)
    yield from text.skip_space()
    yield from _skip_fence(out)
    yield from _end(out, CALL_END, CALL_BEGIN, CALLS_END)


def _checked_kind(out: ParsedOutput, kind: str) -> None:
    """What stands in a name's place where the name comes later."""
    if kind.strip() != "function":
        raise out.text.broken(f"it is a call of the type {kind[:20]!r}, not function")


def _skip_fence(out: ParsedOutput) -> Wait:
    for mark in (FENCE, "json"):
        if (yield from out.text.starts_with(mark)):
            out.text.take_next(len(mark))
    yield from out.text.skip_space()


def _end(out: ParsedOutput, end: str, *others: str) -> Wait:
    """Takes the mark that ends a call, which may be missing at the end of the text and before
    another mark."""
    text = out.text
    yield from text.skip_space()
    mark = yield from text.starts_with(end, *others)
    if mark == end:
        text.take_next(len(end))
    elif not mark and (yield from text.peek()):
        raise text.broken("there is text behind its arguments")


SECTIONS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>", "<|tool_call_section_end|>",
)  # fmt: skip
KIMI_BEGIN = "<|tool_call_begin|>"
KIMI_END = "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


def read_kimi(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recover = skip(through=(KIMI_END,), before=(KIMI_BEGIN, *SECTIONS))
    wanted = marks(KIMI_BEGIN, *SECTIONS)
    while mark := (yield from text.until(wanted, out.content)):
        text.take_next(len(mark))
        out.cut()
        if mark == KIMI_BEGIN:
            yield from read_call(out, partial(_kimi_call, out), recover, lead=mark)


def _kimi_call(out: ParsedOutput, call: OpenCall) -> Wait:
    text = out.text
    identity, mark = yield from text.collect(
        "a call", KIMI_ARGUMENTS, KIMI_END, KIMI_BEGIN, *SECTIONS
    )
    match = _KIMI_ID.fullmatch(identity.strip())
    assert match is not None

    call.set_name(checked_name(text, match.group(1)))
    if mark == KIMI_ARGUMENTS:
        text.take_next(len(mark))

    yield from read_arguments(text, call)
    yield from _end(out, KIMI_END, KIMI_BEGIN, *SECTIONS)
