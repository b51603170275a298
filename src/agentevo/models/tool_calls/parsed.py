"""The content, reasoning and tool calls of a model's text, as a whole and piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar, cast

from agentevo.types import ToolCall


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A text that begins as a call but is not one."""

    text: str
    """The model's whole text of it, marks included."""
    problem: str
    """Why it is not a call: a sentence that the model may read."""
    name: str = ""
    """The tool that it names, if it got that far."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text of a model."""

    content: str
    reasoning: str | None
    """None if there is no thought, or an empty one."""
    tool_calls: tuple[ToolCall, ...]
    """Without ids."""
    malformed: tuple[MalformedCall, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Parsed:
        """The sum of all deltas of one text."""
        content = []
        reasoning = []
        calls = []
        malformed = []
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case CallFinished(_, call):
                    calls.append(call)
                case CallFailed(_, broken):
                    malformed.append(broken)

        return cls("".join(content), "".join(reasoning) or None, tuple(calls), tuple(malformed))


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call whose tool is known. Calls are counted from 0 in the order in which they start."""

    index: int
    name: str
    call_id: str = ""
    """The id that the gateway gives; parsers give none."""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is whole: its arguments are the sum of its deltas."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call is malformed: what its deltas said is void. One without an index never started."""

    index: int | None
    malformed: MalformedCall


Delta = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta | CallFinished | CallFailed
_TEXTS = (ContentDelta, ReasoningDelta, ArgumentsDelta)
T = TypeVar("T")


def join_texts(pieces: Iterable[T]) -> Iterator[T]:
    """The pieces, without empty texts, and with texts of one kind that follow one another as one.
    Arguments of two calls never follow one another at once."""
    for kind, same in groupby(pieces, type):
        if kind not in _TEXTS:
            yield from same
            continue

        texts = [text for piece in same if (text := cast("ContentDelta", piece)).text]
        if len(texts) > 1:
            yield cast("T", replace(texts[0], text="".join(piece.text for piece in texts)))
        elif texts:
            yield cast("T", texts[0])
