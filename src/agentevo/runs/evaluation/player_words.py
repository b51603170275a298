"""The messages between a dashboard and a player (`player.py`). Each line is a JSON object: requests
on the player's standard input, events on its standard output."""

from __future__ import annotations

from typing import Annotated

import msgspec

from agentevo.observability.attempt_tokens import TokenBlock
from agentevo.types import Message

MAX_MESSAGES = 64
MAX_CHARACTERS = 100_000
"""The maximum number of characters of all messages of a request together."""
MAX_TOKENS = 4096
"""The maximum number of tokens of a reply."""
MAX_TEXT = 4_000
"""The maximum number of characters of an error."""
START = "start"
"""The name of the run's initial weights, next to the steps of its checkpoints."""

Id = Annotated[str, msgspec.Meta(pattern=r"^[\w-]{1,64}$")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=10.0)]


class Chat(msgspec.Struct, frozen=True, tag="chat", forbid_unknown_fields=True):
    """A request to answer the last message."""

    id: Id
    conversation: Id
    """Requests of the same conversation continue its recorded tokens."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Temperature = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """A request to cancel the request with that id."""

    id: Id


Request = Chat | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The progress of loading."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    seconds: float
    parameters: int
    device: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat."""

    memory_bytes: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The player ends for this reason."""

    error: str


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Further text of a reply."""

    id: str
    text: str


class Replied(msgspec.Struct, frozen=True, tag="replied"):
    """The end of a reply, with its whole text and its tokens."""

    id: str
    text: str
    tokens: TokenBlock
    num_tokens: int
    num_prompt: int
    seconds: float
    finish: str


class FailedChat(msgspec.Struct, frozen=True, tag="failed"):
    """A request was refused, or failed."""

    id: str
    error: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request has no further events."""

    id: str


Event = Loading | Ready | Beat | Broken | Text | Replied | FailedChat | Done
