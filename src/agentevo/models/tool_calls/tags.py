"""Notations that write every parameter between tags of its own.

    Qwen3-Coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    GLM           <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    XML           <invoke name="f"><parameter name="a">1</parameter></invoke>, in
                  <function_calls>, <tool_calls> or <minimax:tool_call>
    DSML          the same with <｜DSML｜invoke ...>, and string="true" on what is a text
                  (DeepSeek V3.2)

A value ends at its closing tag, wherever that stands: these notations have no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

from agentevo.models.tool_calls.json_notation import checked_name
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, read_call, skip
from agentevo.models.tool_calls.parameters import json_text
from agentevo.models.tool_calls.text import MalformedError, Wait, marks

_BLOCK = "<tool_call>"
_BLOCK_END = "</tool_call>"


class _Arguments:
    """Puts a call's arguments together as JSON."""

    def __init__(self, out: ParsedOutput, call: OpenCall) -> None:
        self._out = out
        self._call = call
        self._seen: set[str] = set()

    def add(self, key: str, value: str, *, is_text: bool | None = None) -> None:
        """`is_text`: what the notation itself says about the value."""
        if key in self._seen:
            raise self._out.text.broken(f"it has the parameter {key!r} twice")
        types = self._out.types
        written = json_text(value) if is_text else types.json_of(self._call.name, key, value)
        before = ", " if self._seen else "{"
        self._call.arguments(f"{before}{json_text(key)}: {written}")
        self._seen.add(key)

    def end(self) -> None:
        self._call.arguments("}" if self._seen else "{}")


def read_qwen_coder(out: ParsedOutput) -> Wait:
    """Reads the text to its end. The outer tags may be missing."""
    text = out.text
    recover = skip(through=(_BLOCK_END,), before=(_BLOCK,))
    while mark := (yield from text.until(marks(_BLOCK, "<function="), out.content)):
        lead = ""
        if mark == _BLOCK:
            lead = text.take_next(len(mark)) + (yield from text.skip_space())
        yield from read_call(
            out, partial(_qwen_coder_call, out, in_block=bool(lead)), recover, lead=lead
        )


def _qwen_coder_call(out: ParsedOutput, call: OpenCall, *, in_block: bool) -> Wait:
    text = out.text
    arguments = _Arguments(out, call)
    yield from _take(out, "<function=")
    call.set_name(checked_name(text, (yield from _up_to(out, ">")).strip()))

    while True:
        yield from text.skip_space()
        mark = yield from text.starts_with("<parameter=", "</function>")
        text.take_next(len(mark))

        if mark != "<parameter=":
            break

        key = yield from _up_to(out, ">")
        value = yield from _up_to(out, "</parameter>")
        arguments.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))

    if not mark:
        raise _unexpected_error(out, "<parameter=...> or </function>")

    arguments.end()
    if in_block:
        yield from text.skip_space()
        if (yield from text.starts_with(_BLOCK_END)):
            text.take_next(len(_BLOCK_END))


def read_glm(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    recover = skip(through=(_BLOCK_END,), before=(_BLOCK,))
    while (yield from text.until(marks(_BLOCK), out.content)):
        lead = text.take_next(len(_BLOCK))
        yield from read_call(out, partial(_glm_call, out), recover, lead=lead)


def _glm_call(out: ParsedOutput, call: OpenCall) -> Wait:
    text = out.text
    arguments = _Arguments(out, call)
    yield from text.skip_space()
    name, _ = yield from text.collect("a call", "\n", "<arg_key>", _BLOCK_END, _BLOCK)
    call.set_name(checked_name(text, name.strip()))

    while True:
        yield from text.skip_space()
        mark = yield from text.starts_with("<arg_key>", _BLOCK_END)
        text.take_next(len(mark))

        if mark != "<arg_key>":
            break

        key = yield from _up_to(out, "</arg_key>")
        yield from _take(out, "<arg_value>")
        arguments.add(key.strip(), (yield from _up_to(out, "</arg_value>")))

    if not mark:
        raise _unexpected_error(out, f"<arg_key> or {_BLOCK_END}")

    arguments.end()


@dataclass(frozen=True)
class Invocations:
    """The notation with <invoke>, whose tags begin with `prefix`."""

    prefix: str
    wrappers: tuple[str, ...]

    def read(self, out: ParsedOutput) -> Wait:
        """Reads the text to its end. A wrapper counts where an invocation follows."""
        text = out.text
        invoke = f"<{self.prefix}invoke"
        opening = tuple(f"<{name}>" for name in self.wrappers)
        recover = skip(through=(f"</{self.prefix}invoke>",), before=(invoke,))
        while mark := (yield from text.until(marks(invoke, *opening), out.content)):
            lead = ""
            if mark != invoke:
                lead = text.take_next(len(mark)) + (yield from text.skip_space())
                if not (yield from text.starts_with(invoke)):
                    out.content(lead)
                    continue

            yield from read_call(out, partial(self._call, out), recover, lead=lead)
            yield from self._skip_wrapper_end(out)

    def _skip_wrapper_end(self, out: ParsedOutput) -> Wait:
        space = yield from out.text.skip_space()
        mark = yield from out.text.starts_with(*(f"</{name}>" for name in self.wrappers))
        out.text.take_next(len(mark))
        out.content("" if mark else space)
        if mark:
            out.cut()

    def _call(self, out: ParsedOutput, call: OpenCall) -> Wait:
        text = out.text
        arguments = _Arguments(out, call)
        parameter = f"<{self.prefix}parameter"
        end = f"</{self.prefix}invoke>"
        yield from _take(out, f"<{self.prefix}invoke")
        call.set_name(checked_name(text, self._name(out, (yield from _up_to(out, ">")))))

        while True:
            yield from text.skip_space()
            mark = yield from text.starts_with(parameter, end)
            text.take_next(len(mark))

            if mark != parameter:
                break

            attributes = yield from _up_to(out, ">")
            key = self._name(out, attributes)
            value = yield from _up_to(out, f"</{self.prefix}parameter>")
            is_text = 'string="true"' in attributes
            arguments.add(key, value, is_text=is_text)

        if not mark:
            raise _unexpected_error(out, f"{parameter} ...> or {end}")

        arguments.end()

    @staticmethod
    def _name(out: ParsedOutput, attributes: str) -> str:
        match = re.search(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""", attributes)
        if match is None:
            raise out.text.broken('it needs name="..." in its tag')
        return match.group(1) or match.group(2) or ""


XML = Invocations("", ("function_calls", "tool_calls", "minimax:tool_call"))
DSML = Invocations("｜DSML｜", ("｜DSML｜function_calls", "｜DSML｜tool_calls"))


def _up_to(out: ParsedOutput, end: str) -> Generator[None, None, str]:
    """The text before `end`, which is taken as well."""
    value, mark = yield from out.text.collect("a call", end)
    out.text.take_next(len(mark))
    return value


def _take(out: ParsedOutput, wanted: str) -> Wait:
    yield from out.text.skip_space()
    if not (yield from out.text.starts_with(wanted)):
        raise _unexpected_error(out, wanted)
    out.text.take_next(len(wanted))


def _unexpected_error(out: ParsedOutput, wanted: str) -> MalformedError:
    text = out.text
    if text.at >= len(text.buffer):
        return text.broken("the text ends inside the call")
    return text.broken(f"it needs {wanted} here")
