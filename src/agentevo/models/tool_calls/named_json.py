"""Notations that write the tool's name between marks, then its arguments as JSON.

Mistral    [TOOL_CALLS]name[ARGS]{...}, and the older [TOOL_CALLS] [{"name": ..., ...}, ...]
DeepSeek   V3 and R1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then
           the arguments as a block of code, <｜tool▁call▁end｜>...<｜tool▁calls▁end｜>;
           V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
Kimi K2    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0
           <|tool_call_argument_begin|>{...}<|tool_call_end|>...<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from agentevo.models.tool_calls.json_notation import (
    FENCE,
    checked_name,
    read_arguments,
    read_object,
)
from agentevo.models.tool_calls.output import (
    OpenCall,
    ParsedOutput,
    Recovery,
    read_call,
    read_calls,
    read_end,
)
from agentevo.models.tool_calls.text import CallText, Wait, marks


@dataclass(frozen=True, kw_only=True)
class NamedCalls:
    """A notation of calls. A call is `begin`, a head, the arguments as JSON, and `end`."""

    begin: str
    end: str = ""
    sections: tuple[str, ...] = ()
    """Marks around a group of calls, which are skipped."""
    head: str
    """A regular expression for the text before the arguments, without white space at its ends. Its
    group is the tool's name."""
    before_arguments: tuple[str, ...]
    """Optional marks between the head and the arguments, in this order."""
    after_arguments: tuple[str, ...] = ()
    has_objects: bool = False
    """Whether objects with name and arguments may also follow `begin`."""

    def read(self, out: ParsedOutput) -> Wait:
        """Reads the text to its end."""
        text = out.text
        begins = (self.begin, *self.sections)
        recovery = Recovery((self.end,) if self.end else (), begins)
        while mark := (yield from text.until(marks(*begins), out.content)):
            text.take_next(len(mark))
            if mark != self.begin:
                out.cut()
                continue

            lead = mark + (yield from text.skip_space())
            if self.has_objects and (yield from text.peek()) in ("[", "{"):
                yield from read_calls(out, read_object, recovery, lead=lead)
            else:
                yield from read_call(out, partial(self._read_call, text), recovery, lead=lead)

    def _read_call(self, text: CallText, call: OpenCall) -> Wait:
        begins = (self.begin, *self.sections)
        ends = (self.end,) if self.end else ()
        head, _ = yield from text.collect(self.before_arguments[0], "{", *ends, *begins)
        match = re.fullmatch(self.head, head.strip(), re.DOTALL)
        if match is None:
            raise text.broken(f"it needs the name of a tool, not {head[:40]!r}")

        call.set_name(checked_name(text, match.group(1).strip()))
        for mark in self.before_arguments:
            yield from text.take_any(mark)

        yield from read_arguments(text, call)
        for mark in self.after_arguments:
            yield from text.take_any(mark)
        if ends:
            yield from read_end(text, ends, begins)


MISTRAL = NamedCalls(
    begin="[TOOL_CALLS]",
    head=r"(.*?)(?:\[CALL_ID\].*)?",
    before_arguments=("[ARGS]",),
    has_objects=True,
)
DEEPSEEK = NamedCalls(
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=r"(?:function\s*<｜tool▁sep｜>)?([^｜]+)(?:<｜tool▁sep｜>)?",
    before_arguments=(FENCE, "json"),
    after_arguments=(FENCE,),
)
KIMI = NamedCalls(
    begin="<|tool_call_begin|>",
    end="<|tool_call_end|>",
    sections=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_section_begin|>",
        "<|tool_call_section_end|>",
    ),
    head=r"(?:functions\.)?(.*?)(?::\d+)?",
    before_arguments=("<|tool_call_argument_begin|>",),
)
