"""The request and reply of a remote model's call, and the common parts of both APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from agentevo.errors import AgentEvoError
from agentevo.inference.conversations.equivalence import places_of
from agentevo.inference.remote_models.images import EncodedImage
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.types import FinishReason, Message, SamplingOverrides

MOST_TOKENS = 10**9
"""The largest plausible number of tokens of one prompt or answer. A server that reports more is not
believed."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one answer, as the server counts them."""

    prompt_tokens: int
    cached_tokens: int = 0
    """The number of prompt tokens that the server had in its cache."""
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
    """The cost by the recipe's prices."""
    is_cached: bool = False
    """Whether it comes from the cache."""
    logprobs: list[float] = []
    """The natural log-probs of given tokens, if the call asked for them."""

    @property
    def text(self) -> str:
        return self.message.text


Listen = Callable[[ContentDelta | ReasoningDelta], None]
"""A function that receives the parts of a model's answer as they arrive. Tool calls are only in the
final reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One call."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    """The tools' schemas in OpenAI's form."""
    tool_choice: str
    """auto, none, required, or the name of a function."""
    form: AnswerForm | None = None
    """The required form of the answer. `tool_choice` decides which calls it may have."""
    images: Mapping[str, EncodedImage] = field(default_factory=dict)
    """Maps a digest to the image, for every image that the messages name."""
    sampling: SamplingOverrides
    """The sampling settings, including the recipe's values for the model. max_new_tokens is always
    set."""

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens or 1


class StreamedAnswer(Protocol):
    """An answer that arrives as events. Invalid events raise LookupError, TypeError, ValueError or
    AttributeError. A failure that the server reports raises BadAnswerError."""

    def add(self, event: Any) -> Sequence[ContentDelta | ReasoningDelta]:
        """Adds an event."""
        ...

    def answer(self) -> Mapping[str, Any]:
        """The body that the server would have sent without events. Raises BadAnswerError if the
        events ended before the answer was complete."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """The functions of one API that write a call and read its answer."""

    path: Callable[[str], str]
    """Base URL -> the URL of requests."""
    headers: Callable[[str | None], dict[str, str]]
    """Key -> the headers of a request."""
    body: Callable[[str, str, WireRequest], dict[str, Any]]
    """(URL, the server's name of the model, the call) -> the body of the request."""
    reply: Callable[[Mapping[str, Any]], RemoteReply]
    """Body of the answer -> the reply. Raises BadAnswerError for an invalid body."""
    stream: Mapping[str, Any]
    """The additional fields of a request whose answer arrives as events."""
    streamed: Callable[[], StreamedAnswer]


class BadAnswerError(AgentEvoError):
    """A server's answer with status 200 is not an answer of its API."""


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages, with an id for every tool call and every result, since servers require them."""
    with_ids: list[Message] = []
    ids: list[str] = []
    for number, (message, place) in enumerate(zip(messages, places_of(messages), strict=True)):
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
