"""The place of a call in a trace, and the header `traceparent` of W3C's Trace Context
(https://www.w3.org/TR/trace-context/). The header identifies the place to other programs, in any
language.

    trace id = 16 bytes of BLAKE2b(run, attempt)        span id = 8 bytes of BLAKE2b(call id)

So every process of a run that takes part in an attempt uses the same trace without communication.
The trace id alone decides whether an attempt is traced, by the rule of OpenTelemetry's sampler
TraceIdRatioBased.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agentevo.types import Message

if TYPE_CHECKING:
    from agentevo.store.call_log import RunningCall

_LOW_64 = 2**64 - 1
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_HEADER_CHARS = 512
"""The maximum number of characters of a header that is read."""


class AttemptTrace(NamedTuple):
    """The trace of an attempt. A trace that is not sampled has no spans, and the header informs
    other programs about it."""

    trace_id: int
    is_sampled: bool


class TracePlace(NamedTuple):
    """A span in a trace."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def trace_of(run: str, attempt: str, share: float) -> AttemptTrace:
    """The trace of an attempt. `share` is the share of all attempts that are traced."""
    trace_id = _id(f"{run}\n{attempt}", 16)
    return AttemptTrace(trace_id, trace_id & _LOW_64 < round(share * 2**64))


def span_of(call_id: str) -> int:
    """The span id of a recorded call."""
    return _id(call_id, 8)


def _id(text: str, size: int) -> int:
    """An id from a text. It is never 0, because 0 is not a valid id."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1


def read_traceparent(text: str) -> TracePlace | None:
    """The place that a header names. None for a header of another form: the standard treats an
    invalid header like a missing one."""
    match = _TRACEPARENT.fullmatch(text.strip()) if len(text) <= MAX_HEADER_CHARS else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id, flags = (int(match[number], 16) for number in (2, 3, 4))
    return TracePlace(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


class Tracing(Protocol):
    """Makes spans of recorded calls (observability/tracing/tracer.py)."""

    @property
    def contents(self) -> bool:
        """Whether spans contain the messages."""
        ...

    @property
    def token2text(self) -> bool:
        """Whether spans contain the texts of tokens."""
        ...

    def trace_of(self, trajectory_id: str) -> AttemptTrace: ...

    def end_span(self, call: RunningCall) -> None:
        """Makes a span of a call that has ended, if its trace is sampled. Takes no time, and never
        fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMessage:
    """The messages of a model's call, for its span. The store has them in the trajectory."""

    messages: Sequence[Message] = ()
    answers: Sequence[Message] = ()
    tools: str = ""
    """The JSON schemas of the tools."""
    finish_reasons: Sequence[str] = ()
    temperature: float | None = None
    texts: Callable[[], tuple[str, list[str]]] | None = None
    """Decodes the tokens of the prompt and of each answer. The thread that makes spans calls it."""


@dataclass(eq=False)
class Asker:
    """A program for which a call is made: the place in a trace that its request named, and the call
    that resulted."""

    place: TracePlace | None
    outer: RunningCall | None
    """The current call when the request arrived."""
    call: RunningCall | None = None

    @property
    def answer(self) -> str | None:
        """The header of the answer: the place of the call."""
        place = None if self.call is None else self.call.place
        return None if place is None else place.header
