"""Notations that write every parameter between separate tags.

    Qwen3-Coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    GLM           <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    XML           <invoke name="f"><parameter name="a">1</parameter></invoke>, in
                  <function_calls>, <tool_calls> or <minimax:tool_call>
    DSML          the same with <｜DSML｜invoke ...>, and string="true" on what is a text
                  (DeepSeek V3.2 and V4); a call may have a JSON object in place of parameters

A value ends at the first closing tag, because these notations have no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

from agentevo.models.tool_calls.json_notation import checked_name, read_arguments
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recovery, read_call, skip_mark
from agentevo.models.tool_calls.parameters import json_text
from agentevo.models.tool_calls.text import CallText, Wait, marks

_BLOCK = "<tool_call>"
_BLOCK_END = "</tool_call>"
_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")


@dataclass(frozen=True, kw_only=True)
class TagCalls:
    """A notation: `begin`, the name, parameters, `end`."""

    begin: str
    name_ends: tuple[str, ...] = (">",)
    parameter: str
    """The text that begins a parameter. Its key follows."""
    key_end: str = ">"
    value_begin: str = ""
    value_end: str
    values_on_lines: bool = False
    """Whether a value may be on separate lines."""
    end: str
    has_attributes: bool = False
    """Whether names and keys are attributes called `name`."""
    recovery: Recovery
    may_have_json: bool = False
    """Whether a JSON object may be in the place of the parameters."""
    wrappers: tuple[str, ...] = ()
    """Tags that may surround calls. A wrapper that is in `recovery` is the beginning of a call by
    itself. Another wrapper is the beginning only if a call follows."""
    wrapper_ends: tuple[str, ...] = ()

    def read(self, out: ParsedOutput) -> Wait:
        """Reads the text to its end."""
        text = out.text
        while mark := (yield from text.until(marks(self.begin, *self.wrappers), out.content)):
            lead = ""
            if mark != self.begin:
                lead = text.take_next(len(mark)) + (yield from text.skip_space())
                is_call = mark in self.recovery.before
                if not is_call and not (yield from text.starts_with(self.begin)):
                    out.content(lead)
                    continue

            yield from read_call(out, partial(self._read_call, out), self.recovery, lead=lead)
            if self.wrapper_ends:
                yield from skip_mark(out, *self.wrapper_ends)

    def _read_call(self, out: ParsedOutput, call: OpenCall) -> Wait:
        text = out.text
        yield from text.expect(self.begin)
        yield from text.skip_space()
        name, mark = yield from text.collect(*self.name_ends)
        call.set_name(checked_name(text, self._name(text, name)))
        if mark == ">":
            text.take_next()

        yield from text.skip_space()
        if self.may_have_json and (yield from text.peek()) == "{":
            yield from read_arguments(text, call)
            yield from text.expect(self.end)
            return

        while (yield from text.expect(self.parameter, self.end)) == self.parameter:
            attributes = yield from _take_until(text, self.key_end)
            if self.value_begin:
                yield from text.expect(self.value_begin)

            key = self._name(text, attributes)
            value = yield from _take_until(text, self.value_end)
            if self.values_on_lines:
                value = value.removeprefix("\n").removesuffix("\n")

            is_text = self.has_attributes and 'string="true"' in attributes
            call.begin_argument(key)
            call.add_arguments(
                json_text(value) if is_text else out.types.json_of(call.name, key, value)
            )

    def _name(self, text: CallText, written: str) -> str:
        if not self.has_attributes:
            return written.strip()

        return name_attribute(text, written)


def name_attribute(text: CallText, attributes: str) -> str:
    """The value of `name` in a tag. Raises MalformedError without it."""
    match = _NAME.search(attributes)
    if match is None:
        raise text.broken('it needs name="..." in its tag')
    return match.group(1) or match.group(2) or ""


def _take_until(text: CallText, end: str) -> Generator[None, None, str]:
    """Takes the text before `end`, and `end`. Returns the text."""
    before, _ = yield from text.collect(end)
    text.take_next(len(end))
    return before


QWEN_CODER = TagCalls(
    begin="<function=",
    parameter="<parameter=",
    value_end="</parameter>",
    values_on_lines=True,
    end="</function>",
    recovery=Recovery((_BLOCK_END,), (_BLOCK,)),
    wrappers=(_BLOCK,),
    wrapper_ends=(_BLOCK_END,),
)
GLM_CALLS = TagCalls(
    begin=_BLOCK,
    name_ends=("\n", "<arg_key>", _BLOCK_END, _BLOCK),
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    end=_BLOCK_END,
    recovery=Recovery((_BLOCK_END,), (_BLOCK,)),
)


def _invocations(prefix: str, *wrappers: str) -> TagCalls:
    """The notation with <invoke>. Its tags begin with `prefix`."""
    return TagCalls(
        begin=f"<{prefix}invoke",
        parameter=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        end=f"</{prefix}invoke>",
        has_attributes=True,
        may_have_json=bool(prefix),
        recovery=Recovery((f"</{prefix}invoke>",), (f"<{prefix}invoke",)),
        wrappers=tuple(f"<{prefix}{name}>" for name in wrappers),
        wrapper_ends=tuple(f"</{prefix}{name}>" for name in wrappers),
    )


XML = _invocations("", "function_calls", "tool_calls", "minimax:tool_call")
DSML = _invocations("｜DSML｜", "function_calls", "tool_calls")
