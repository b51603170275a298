"""Parses a model's text into content, reasoning and tool calls, as a whole or while it arrives.

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
    "<mm:think>": "</mm:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
"""The mark at the beginning of reasoning -> the mark at its end, for all families."""
HARMONY = "harmony"
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas in OpenAI's form."""
Read = Callable[[ParsedOutput], Wait]


@dataclass(frozen=True)
class ToolCallParser:
    """A parser for the calls and thoughts of one family of models."""

    name: str
    read: Read
    """The function that reads a text after its thoughts."""
    shown_by: str
    """A regular expression. A chat template that matches it needs this parser."""
    begins: str = ""
    """A regular expression that matches everything that `read` may take as the beginning of a call,
    and possibly more. Empty if unknown."""
    thoughts: tuple[str, ...] = ("<think>",)
    """The marks that begin a thought; keys of THOUGHTS."""

    def parse(
        self, text: str, *, opening: str = "", tools: Tools | None = None, calls: bool = True
    ) -> Parsed:
        """Parses a whole text.

        `opening`: the text that the generation prompt put before it, such as "<think>\\n".
        `tools`: needed for notations that write parameters without quotes. Without `calls`, calls
        are content.
        """
        stream = self.stream(opening=opening, tools=tools, calls=calls)
        return Parsed.of([*stream.feed(text), *stream.finish()])

    def stream(
        self, *, opening: str = "", tools: Tools | None = None, calls: bool = True
    ) -> StreamingParse:
        """Begins to parse a text that arrives in pieces. The arguments are those of `parse`."""
        return StreamingParse(self, opening=opening, tools=tools, calls=calls)


class StreamingParse:
    """The parse of one text that arrives in pieces."""

    def __init__(
        self, parser: ToolCallParser, *, opening: str, tools: Tools | None, calls: bool
    ) -> None:
        self._text = CallText()
        self._out = ParsedOutput(self._text, ParameterTypes(tools))
        self._reading = _read(parser, self._out, calls)
        if opening.rstrip().endswith((*parser.thoughts, "<|message|>")):
            self._text.add(opening)

    def feed(self, piece: str) -> list[Delta]:
        """Adds the next piece of the text, and returns the deltas that are certain now."""
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
    """Reads the thoughts at the beginning of the text. A thought without an end mark continues to
    the end of the text."""
    text = out.text
    while True:
        space = yield from text.skip_space()
        begin = yield from text.take_any(*begins)
        if not begin:
            out.content(space)
            return

        out.cut()
        out.new_thought()
        yield from text.take_any(begin)  # both the prompt and the model opened the thought

        end = THOUGHTS[begin]
        if not (yield from text.until(marks(end), out.reasoning)):
            return

        text.take_next(len(end))
        out.cut()
