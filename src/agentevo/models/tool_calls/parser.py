"""A model's text -> content, reasoning and tool calls, as a whole or while it arrives.

    parser = find_parser(tokenizer.get_chat_template())
    parsed = parser.parse(text, opening=conversation.opening(turn), tools=tools)

The text is `ChatFormat.text(completion_ids)`: with special tokens, because several notations are
made of them, and without the token that ended the turn. Invariants, for any text and any way of
cutting it: nothing raises; the deltas of a stream sum up to the result of `parse`; text that is
neither content nor reasoning nor a call is in a MalformedCall; the cost is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.models.tool_calls.harmony import read_harmony
from agentevo.models.tool_calls.output import ParsedOutput
from agentevo.models.tool_calls.parameters import ParameterTypes
from agentevo.models.tool_calls.parsed import Delta, Parsed
from agentevo.models.tool_calls.text import CallText, Marks, Wait, marks

THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""How families mark the beginning and the end of the model's reasoning."""
HARMONY = "harmony"
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas in OpenAI's form."""
Read = Callable[[ParsedOutput], Wait]


@dataclass(frozen=True)
class ToolCallParser:
    """How one family of models writes calls and thoughts."""

    name: str
    read: Read
    """Reads a text without its thoughts."""
    shown_by: str
    """A regular expression of what chat templates have that ask for it."""
    begins: str = ""
    """A regular expression of all that `read` may take for the beginning of a call. It may match
    more than that; empty if it is not known."""
    thoughts: tuple[str, ...] = ("<think>",)
    """The marks that begin a thought; keys of THOUGHTS."""

    def parse(
        self, text: str, *, opening: str = "", tools: Tools | None = None, calls: bool = True
    ) -> Parsed:
        """Parses a whole text.

        `opening`: what the generation prompt put before it, such as "<think>\\n". `tools` are
        needed by notations that write parameters without quotes. Without `calls`, calls are
        content.
        """
        stream = self.stream(opening=opening, tools=tools, calls=calls)
        return Parsed.of([*stream.feed(text), *stream.finish()])

    def stream(
        self, *, opening: str = "", tools: Tools | None = None, calls: bool = True
    ) -> StreamingParse:
        """A parse of text that is still to come, with `parse`'s arguments."""
        return StreamingParse(self, opening=opening, tools=tools, calls=calls)


class StreamingParse:
    """One text in pieces, by one parser."""

    def __init__(
        self, parser: ToolCallParser, *, opening: str, tools: Tools | None, calls: bool
    ) -> None:
        self._text = CallText()
        self._out = ParsedOutput(self._text, ParameterTypes(tools))
        self._reading = _read(parser, self._out, calls)
        if opening.rstrip().endswith((*parser.thoughts, "<|message|>")):
            self._text.add(opening)

    def feed(self, piece: str) -> list[Delta]:
        """Deltas that are certain after the next piece of the text."""
        self._text.add(piece)
        next(self._reading, None)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """The deltas that were held back until the text ended. Nothing may be fed afterwards."""
        self._text.ended = True
        return self.feed("")


def _read(parser: ToolCallParser, out: ParsedOutput, calls: bool) -> Wait:
    if parser.name == HARMONY:
        yield from read_harmony(out, calls=calls)
    else:
        yield from _read_thoughts(out, parser.thoughts)
        yield from parser.read(out) if calls else out.text.until(Marks(()), out.content)
    out.finish()


def _read_thoughts(out: ParsedOutput, begins: tuple[str, ...]) -> Wait:
    """Reads the thoughts at the beginning of the text. One without an end continues to the end of
    the text."""
    text = out.text
    while True:
        space = yield from text.skip_space()
        begin = yield from text.take_any(*begins)
        if not begin:
            out.content(space)
            return

        out.cut()
        out.new_thought()
        yield from text.take_any(begin)  # the prompt opened the thought, and the model too

        end = THOUGHTS[begin]
        if not (yield from text.until(marks(end), out.reasoning)):
            return

        text.take_next(len(end))
        out.cut()
