"""The description of one API of the gateway: how to read its requests, and how to write its
answers, events and errors. The application (app.py) uses only this description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize
from agentevo.models.tool_calls import Delta

Event = dict[str, Any]
Request = TypeVar("Request", bound=ModelRequest)


class AnswerStream(Protocol):
    """The events of one streamed answer, in their order."""

    def begin(self, prompt: PromptSize) -> list[Event]:
        """The events before the first token."""
        ...

    def pieces(self, number: int, pieces: Sequence[Delta]) -> list[Event]:
        """The events for the next pieces of completion `number`."""
        ...

    def end(self, replies: Sequence[ModelReply]) -> list[Event]:
        """The last events, after all completions have ended."""
        ...

    def failure_events(self, refusal: Refusal) -> list[Event]:
        """The last events if the answer ends with an error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Generic[Request]):
    """One API of the gateway, as functions between HTTP bodies and the gateway's types."""

    path: str
    """The path below /v1, such as "/chat/completions"."""
    request_of: Callable[[Mapping[str, Any], Memory, RequestImages], Request]
    """Reads a request from its body, on any thread. The memory belongs to the session; most APIs do
    not use it. Raises BadRequestError or Refusal for a request that can't be answered."""
    answer: Callable[[Request, Sequence[ModelReply]], dict[str, Any]]
    """The body of an answer that is not streamed."""
    stream: Callable[[Request], AnswerStream]
    error: Callable[[Refusal], dict[str, Any]]
    """The body of an answer that is an error."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Maps an HTTP status of the gateway to the status that this API uses instead."""
    encode: Callable[[Event], bytes]
    """Encodes an event as bytes of the stream."""


def data_event(event: Event) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def named_event(event: Event) -> bytes:
    """A server-sent event whose name is its type."""
    return b"event: " + event["type"].encode() + b"\n" + data_event(event)
