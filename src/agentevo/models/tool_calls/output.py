"""A parser's output for a text, as deltas.

Content is the text outside of thoughts and calls, joined. If a thought or call was cut out at the
beginning or end of the text, the adjacent white space is cut, too. A text without thoughts and
calls is its own content. White space that may be adjacent to a cut is held back. Reasoning has no
white space at its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from agentevo.models.tool_calls.parameters import ParameterTypes, json_text
from agentevo.models.tool_calls.parsed import (
    ArgumentsDelta,
    CallFailed,
    CallFinished,
    CallStarted,
    ContentDelta,
    Delta,
    MalformedCall,
    ReasoningDelta,
    join_texts,
)
from agentevo.models.tool_calls.text import CallText, MalformedError, Wait, ignore, marks
from agentevo.types import ToolCall

PARAGRAPH = "\n\n"
"""The text between two thoughts, and between two messages of one completion."""


class Prose:
    """Text whose white space is stripped next to cuts."""

    def __init__(self, *, strip_end: bool) -> None:
        self._begun = False
        self._space: list[str] = []
        """White space that was not passed on yet."""
        self._cut = self._cut_at_end = strip_end

    def add(self, text: str) -> str:
        """Adds text. Returns the part of it, and of the text held back, that can be shown."""
        if not self._begun and self._cut:
            text = text.lstrip()

        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""

        shown = "".join([*self._space, body])
        self._space = [text[len(body) :]]
        self._begun = True
        self._cut = self._cut_at_end

        return shown

    def cut(self) -> None:
        """Call this where a thought or call was cut out."""
        self._cut = True
        if not self._begun:
            self._space.clear()

    def new_paragraph(self) -> None:
        if self._begun:
            self._space = [PARAGRAPH]

    def finish(self) -> str:
        """The white space at the end, if it is part of the text."""
        return "" if self._cut else "".join(self._space)


class ParsedOutput:
    """Collects deltas. `types` has the types of the tools' parameters, for notations that write
    values without quotes."""

    def __init__(self, text: CallText, types: ParameterTypes) -> None:
        self.text = text
        self.types = types
        self.num_calls = 0
        self._content = Prose(strip_end=False)
        self._reasoning = Prose(strip_end=True)
        self._deltas: list[Delta] = []

    def content(self, text: str) -> None:
        self.add(ContentDelta(self._content.add(text)))

    def reasoning(self, text: str) -> None:
        self.add(ReasoningDelta(self._reasoning.add(text)))

    def cut(self) -> None:
        """Call this at a mark, which is not part of the text."""
        self._content.cut()
        self.text.last = ""

    def new_thought(self) -> None:
        self._reasoning.new_paragraph()

    def new_message(self) -> None:
        self._content.new_paragraph()

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def finish(self) -> None:
        """Call this when the text has ended."""
        self.add(ContentDelta(self._content.finish()))

    def take(self) -> list[Delta]:
        """The deltas since the last call of this method."""
        deltas = list(join_texts(self._deltas))
        self._deltas = []
        return deltas


class OpenCall:
    """A call that is being read.

    `is_bare`: no mark shows that it is a call, so it counts as a call only after its tool and its
    arguments are recognised. If the text breaks before that, it is content. The closing brace of
    the arguments is passed on only when the call is complete, so the deltas of a broken call are
    never valid JSON.
    """

    def __init__(self, out: ParsedOutput, *, is_bare: bool) -> None:
        self.is_bare = is_bare
        self.name = ""
        self._out = out
        self._index: int | None = None
        self._arguments: list[str] = []
        self._num_shown = 0
        self._keys: set[str] = set()

    @property
    def is_call(self) -> bool:
        return not self.is_bare or self._index is not None

    def set_name(self, name: str) -> None:
        self.name = name
        if self._arguments or not self.is_bare:
            self._show()

    def add_arguments(self, text: str) -> None:
        """Adds text of the arguments' JSON."""
        self._arguments.append(text)
        if self.name:
            self._show()

    def begin_argument(self, key: str) -> None:
        """Begins an argument whose key is not written in JSON. Its value follows."""
        if key in self._keys:
            raise self._out.text.broken(f"it has the parameter {key!r} twice")
        self.add_arguments(f"{', ' if self._keys else '{'}{json_text(key)}: ")
        self._keys.add(key)

    def _show(self, *, is_whole: bool = False) -> int:
        if self._index is None:
            self._index = self._out.num_calls
            self._out.num_calls += 1
            self._out.add(CallStarted(self._index, self.name))

        num_shown = len(self._arguments)
        if self._arguments and self._arguments[-1].endswith("}") and not is_whole:
            num_shown -= 1
        for text in self._arguments[self._num_shown : num_shown]:
            self._out.add(ArgumentsDelta(self._index, text))
        self._num_shown = num_shown
        return self._index

    def finish(self) -> None:
        if self._keys or not self._arguments:
            self.add_arguments("}" if self._keys else "{}")
        call = ToolCall(self.name, "".join(self._arguments))
        self._out.add(CallFinished(self._show(is_whole=True), call))

    def fail(self, text: str, problem: str) -> None:
        self._out.add(CallFailed(self._index, MalformedCall(text, problem, self.name)))


class Recovery(NamedTuple):
    """Where a broken call ends: after the first mark of `through`, before the first mark of
    `before`, or at the end of the text."""

    through: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


def read_call(
    out: ParsedOutput,
    body: Callable[[OpenCall], Wait],
    recovery: Recovery,
    *,
    lead: str = "",
    is_bare: bool = False,
) -> Generator[None, None, bool]:
    """Reads one call with `body`, which may raise MalformedError. `lead`: text of the call that was
    taken already. False if there is no call."""
    text = out.text
    call = OpenCall(out, is_bare=is_bare)
    record = text.record = [lead]
    problem = ""
    try:
        yield from body(call)
        call.finish()
    except MalformedError as error:
        problem = str(error)

    if problem and call.is_call:
        mark = yield from text.until(marks(*recovery.through, *recovery.before), ignore)
        if mark in recovery.through:
            text.take_next(len(mark))
        call.fail("".join(record), problem)

    text.record = None
    if call.is_call:
        out.cut()
    else:
        out.content("".join(record))
    return not problem


def read_calls(
    out: ParsedOutput,
    read_item: Callable[[CallText, OpenCall], Wait],
    recovery: Recovery,
    *,
    lead: str = "",
    is_bare: bool = False,
    may_end_in_comma: bool = False,
    goes_on: Callable[[CallText], Generator[None, None, bool]] | None = None,
) -> Generator[None, None, bool]:
    """Reads calls: an item, or a list of items with commas. Then `goes_on` takes what follows, and
    if it returns true, another item or list is read. False if the first item is no call. An error
    after a call makes that call malformed."""
    text = out.text
    in_list = False
    is_first = True
    has_next = True

    def read_one(call: OpenCall) -> Wait:
        nonlocal in_list, has_next, lead
        has_next = False
        if is_first:
            in_list = bool((yield from text.take_any("[")))
            yield from text.skip_space()

        yield from read_item(text, call)

        if in_list and (yield from text.expect(",", "]")) == ",":
            lead = "," + (yield from text.skip_space())
            has_next = not (may_end_in_comma and (yield from text.take_any("]")))
        elif goes_on is not None:
            in_list = False
            lead = ""
            has_next = yield from goes_on(text)

    while has_next:
        is_bare = is_bare and is_first
        if not (yield from read_call(out, read_one, recovery, lead=lead, is_bare=is_bare)):
            return not is_first
        is_first = False

    return True


def read_end(
    text: CallText, ends: tuple[str, ...], next_marks: tuple[str, ...]
) -> Generator[None, None, str]:
    """Takes the mark that ends a call. The mark may be missing at the end of the text, and before
    one of `next_marks`, which is then returned."""
    mark = yield from text.take_any(*ends)
    if not mark:
        mark = yield from text.starts_with(*next_marks)
        if not mark and (yield from text.peek()):
            raise text.broken("there is text behind its JSON")
    return mark


def skip_mark(out: ParsedOutput, *strings: str) -> Wait:
    """Takes a mark after calls and the white space before it, if there is one."""
    space = yield from out.text.skip_space()
    if (yield from out.text.take_any(*strings)):
        out.cut()
    else:
        out.content(space)
