"""What a parser makes of a text, as deltas.

Content is the text outside of thoughts and calls, joined. Where one of them was cut out at an end
of it, the white space beside the cut goes as well; a text without any is its own content. White
space that may stand beside a cut is held back. Reasoning has no white space at its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal

from agentevo.models.tool_calls.parameters import ParameterTypes
from agentevo.models.tool_calls.parsed import (
    ArgumentsDelta,
    CallFailed,
    CallFinished,
    CallStarted,
    ContentDelta,
    Delta,
    MalformedCall,
    ReasoningDelta,
)
from agentevo.models.tool_calls.text import CallText, MalformedError, Wait, ignore, marks
from agentevo.types import ToolCall

PARAGRAPH = "\n\n"
"""What stands between two thoughts, and between two messages of one completion."""


class Prose:
    """Running text that is stripped beside cuts."""

    def __init__(self, *, strip_end: bool) -> None:
        self._begun = False
        self._space: list[str] = []
        """White space that was not passed on yet."""
        self._cut = self._cut_at_end = strip_end

    def add(self, text: str) -> str:
        """What of this text and of what was held back can be shown."""
        if not self._begun and self._cut:
            text = text.lstrip()

        body = text.rstrip()
        if not body:
            if text:
                self._space.append(text)
            return ""

        shown = "".join([*self._space, body])
        self._space = [text[len(body) :]]
        self._begun = True
        self._cut = self._cut_at_end

        return shown

    def cut(self) -> None:
        """Something else stands here."""
        self._cut = True
        if not self._begun:
            self._space.clear()

    def new_paragraph(self) -> None:
        if self._begun:
            self._space = [PARAGRAPH]

    def rest(self) -> str:
        """The white space at the end, where it belongs to the text."""
        return "" if self._cut else "".join(self._space)


class ParsedOutput:
    """Collects deltas. `types` are the tools' parameters, for notations that write values bare."""

    def __init__(self, text: CallText, types: ParameterTypes) -> None:
        self.text = text
        self.types = types
        self.num_calls = 0
        self._content = Prose(strip_end=False)
        self._reasoning = Prose(strip_end=True)
        self._deltas: list[Delta] = []
        self._growing: tuple[Literal["content", "reasoning"] | int, list[str]] | None = None
        """The delta that is being put together: of what, and its pieces. A number is a call's."""

    def content(self, text: str) -> None:
        self._grow("content", self._content.add(text))

    def reasoning(self, text: str) -> None:
        self._grow("reasoning", self._reasoning.add(text))

    def cut(self) -> None:
        """A mark stands here, which belongs to no text."""
        self._content.cut()
        self.text.last = ""

    def new_thought(self) -> None:
        self._reasoning.new_paragraph()

    def new_message(self) -> None:
        self._content.new_paragraph()

    def arguments(self, index: int, text: str) -> None:
        self._grow(index, text)

    def add(self, delta: Delta) -> None:
        self._flush()
        self._deltas.append(delta)

    def finish(self) -> None:
        """The text has ended."""
        self._grow("content", self._content.rest())

    def take(self) -> list[Delta]:
        """The deltas since the last call of this method."""
        self._flush()
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _grow(self, kind: Literal["content", "reasoning"] | int, text: str) -> None:
        if not text:
            return
        if self._growing is None or self._growing[0] != kind:
            self._flush()
            self._growing = (kind, [])
        self._growing[1].append(text)

    def _flush(self) -> None:
        if self._growing is None:
            return

        kind, pieces = self._growing
        text = "".join(pieces)
        self._growing = None

        if kind == "content":
            self._deltas.append(ContentDelta(text))
        elif kind == "reasoning":
            self._deltas.append(ReasoningDelta(text))
        else:
            self._deltas.append(ArgumentsDelta(int(kind), text))


class OpenCall:
    """A call that is being read.

    `bare`: no mark says that it is a call, so it is one from where its tool and its arguments have
    shown themselves; before that, what breaks is content.
    """

    def __init__(self, out: ParsedOutput, bare: bool) -> None:
        self._out = out
        self._bare = bare
        self.name = ""
        self._index: int | None = None
        self._pieces: list[str] = []
        self._shown = 0
        self.finished = False

    @property
    def is_call(self) -> bool:
        return not self._bare or self._index is not None

    def set_name(self, name: str) -> None:
        self.name = name
        if self._pieces or not self._bare:
            self._start()

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON."""
        self._pieces.append(text)
        if self.name:
            self._start()

    def _start(self) -> None:
        if self._index is None:
            self._index = self._out.num_calls
            self._out.num_calls += 1
            self._out.add(CallStarted(self._index, self.name))
        for piece in self._pieces[self._shown :]:
            self._out.arguments(self._index, piece)
        self._shown = len(self._pieces)

    def finish(self) -> None:
        if not self._pieces:
            self.arguments("{}")
        self._start()
        assert self._index is not None
        call = ToolCall(self.name, "".join(self._pieces))
        self._out.add(CallFinished(self._index, call))
        self.finished = True

    def fail(self, text: str, problem: str) -> None:
        self._out.add(CallFailed(self._index, MalformedCall(text, problem, self.name)))


Recover = Callable[[CallText], Wait]
"""Reads what is left of a call that broke."""


def skip(through: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Recover:
    """A broken call goes on to the end of the first mark of `through` or the beginning of the first
    mark of `before`; where none comes, to the end of the text."""

    def recover(text: CallText) -> Wait:
        mark = yield from text.until(marks(*through, *before), ignore)
        if mark in through:
            text.take_next(len(mark))

    return recover


def read_call(
    out: ParsedOutput,
    body: Callable[[OpenCall], Wait],
    recover: Recover,
    *,
    lead: str = "",
    bare: bool = False,
) -> Generator[None, None, bool]:
    """Reads one call with `body`, which raises MalformedError, after `lead`, which was taken
    already. False where it is none."""
    text = out.text
    call = OpenCall(out, bare)
    text.record = [lead]
    try:
        yield from body(call)
    except MalformedError as error:
        problem = str(error)
        if not call.is_call:
            out.content("".join(text.record))
            text.record = None
            return False
        yield from recover(text)
        call.fail("".join(text.record), problem)
    else:
        call.finish()

    whole = call.finished
    text.record = None
    out.cut()
    return whole
