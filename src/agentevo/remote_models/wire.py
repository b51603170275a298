"""The request and reply of a remote model's call, and the common parts of both APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from agentevo.errors import AgentEvoError, BadRequestError
from agentevo.inference.equivalence import places_of
from agentevo.models.answer_form import AnswerForm
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.types import FinishReason, Message, SamplingOverrides

MOST_TOKENS = 10**9
"""Of one prompt or answer, as a server may count them."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one answer, as the server counts them."""

    prompt_tokens: int
    cached_tokens: int = 0
    """How many of those the server had in its cache."""
    completion_tokens: int

    def __post_init__(self) -> None:
        counts = (self.prompt_tokens, self.completion_tokens)
        if not 0 <= self.cached_tokens <= self.prompt_tokens or self.completion_tokens < 0:
            raise ValueError(f"the server reports {self}, which is impossible")
        if max(counts) > MOST_TOKENS:
            raise ValueError(
                f"the server reports more than {MOST_TOKENS} tokens, which is impossible"
            )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RemoteReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a remote model."""

    message: Message
    """Tool calls and reasoning are separate from the content."""
    finish_reason: FinishReason
    usage: Usage | None = None
    """None if the server does not report it."""
    cost: float = 0.0
    """By the recipe's prices."""
    is_cached: bool = False
    """It was kept from an earlier call."""

    @property
    def text(self) -> str:
        return self.message.text


Listen = Callable[[ContentDelta | ReasoningDelta], None]
"""Receives a model's answer as it comes; only the reply has a call of a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One call."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    """In OpenAI's form."""
    tool_choice: str
    """auto, none, required, or the name of a function."""
    form: AnswerForm | None = None
    """The form of the answer; tool_choice decides which calls it may have."""
    sampling: SamplingOverrides
    """With all of the recipe's values for the model; max_new_tokens is set."""

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens or 1


class StreamedAnswer(Protocol):
    """An answer that comes in events. A missing part of an event raises LookupError, TypeError,
    ValueError or AttributeError, a reported failure BadAnswerError."""

    def add(self, event: Any) -> Sequence[ContentDelta | ReasoningDelta]:
        """Adds an event."""
        ...

    def answer(self) -> Mapping[str, Any]:
        """The body that the server would have sent in one piece. Raises BadAnswerError if the
        events ended before the answer did."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """An API: how a call is written and its answer read."""

    path: Callable[[str], str]
    """The URL of a base URL."""
    headers: Callable[[str | None], dict[str, str]]
    """For a key."""
    body: Callable[[str, str, WireRequest], dict[str, Any]]
    """For a URL, the server's name of the model, and the call."""
    reply: Callable[[Mapping[str, Any]], RemoteReply]
    """Raises BadAnswerError for anything else."""
    stream: Mapping[str, Any]
    """The fields of a request for an answer in events."""
    streamed: Callable[[], StreamedAnswer]


class BadAnswerError(AgentEvoError):
    """A server's answer with status 200 is not an answer of its API."""


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which every tool call and every result has an id, as servers demand."""
    with_ids: list[Message] = []
    ids: list[str] = []
    for number, (message, place) in enumerate(zip(messages, places_of(messages), strict=True)):
        if not isinstance(message.content, str):
            raise BadRequestError(
                f"message {number + 1} has an image, which is known by its digest alone: a remote "
                "model can't see it; send text"
            )

        if message.role == "tool":
            call_id = message.tool_call_id or (ids[place] if place < len(ids) else f"call_{number}")
            message = msgspec.structs.replace(message, tool_call_id=call_id)
        elif message.tool_calls:
            ids = [call.id or f"call_{number}_{n}" for n, call in enumerate(message.tool_calls)]
            calls = tuple(
                msgspec.structs.replace(call, id=id_)
                for call, id_ in zip(message.tool_calls, ids, strict=True)
            )
            message = msgspec.structs.replace(message, tool_calls=calls)

        with_ids.append(message)

    return with_ids
