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
    """The whole text of the call, marks included."""
    problem: str
    """Why it is not a call, as a sentence that the model can read."""
    name: str = ""
    """The tool's name, if it could be read."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text of a model."""

    content: str
    reasoning: str | None
    """The reasoning. None if there is no thought, or an empty one."""
    tool_calls: tuple[ToolCall, ...]
    """The tool calls, without ids."""
    malformed: tuple[MalformedCall, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Parsed:
        """Adds up all deltas of one text."""
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
    """The next part of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next part of the reasoning."""

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
    """The next part of the JSON of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is complete. Its arguments are the sum of its deltas."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call is malformed, and its deltas are void. If it has no index, the call had not
    started."""

    index: int | None
    malformed: MalformedCall


Delta = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta | CallFinished | CallFailed
_TEXTS = (ContentDelta, ReasoningDelta, ArgumentsDelta)
T = TypeVar("T")


def join_texts(pieces: Iterable[T]) -> Iterator[T]:
    """Removes empty texts, and joins adjacent texts of one kind. Arguments of two calls are never
    adjacent."""
    for kind, same in groupby(pieces, type):
        if kind not in _TEXTS:
            yield from same
            continue

        texts = [text for piece in same if (text := cast("ContentDelta", piece)).text]
        if len(texts) > 1:
            yield cast("T", replace(texts[0], text="".join(piece.text for piece in texts)))
        elif texts:
            yield cast("T", texts[0])
