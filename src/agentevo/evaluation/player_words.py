"""The messages between a dashboard and a player (`player.py`). Each line is a JSON object: requests
on the player's standard input, events on its standard output."""

from __future__ import annotations

from typing import Annotated

import msgspec

from agentevo.observability.attempt_tokens import TokenBlock
from agentevo.observability.attempt_view import TurnView
from agentevo.pages.worlds import WorldPiece
from agentevo.types import Message, Task

MAX_MESSAGES = 64
MAX_CHARACTERS = 100_000
"""The maximum number of characters of all messages of a request together, and of a query."""
MAX_TOKENS = 4096
"""The maximum number of tokens of a reply."""
MAX_TEXT = 4_000
"""The maximum number of characters of a call's input or result, and of any error."""
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


class Play(msgspec.Struct, frozen=True, tag="play", forbid_unknown_fields=True):
    """A request to play an attempt at `task`, else at `query`, else at the held-out or training
    task with that number."""

    id: Id
    task: Task | None = None
    query: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None
    answer: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None
    is_train: bool = False
    number: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    draw: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    """Part of the seed: another value samples other tokens for the same task."""
    temperature: Temperature = 1.0


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """A request to cancel the request with that id."""

    id: Id


Request = Chat | Play | Stop


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


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The task that is played."""

    id: str
    task: str
    query: str
    scorer: str
    """The name of the scorer. Empty if there is none."""


class Called(msgspec.Struct, frozen=True, tag="called"):
    """A call that starts (`took_s` is None) or has ended."""

    id: str
    number: int
    """The number of the call in the attempt, from 0."""
    kind: str
    name: str
    took_s: float | None = None
    status: str = ""
    texts: list[tuple[str, str]] = []
    """(name, text) pairs: the call's input and its result."""


class Turned(msgspec.Struct, frozen=True, tag="turned"):
    """A reply of the policy. `number` is the number of its call."""

    id: str
    number: int
    agent: str
    turn: TurnView
    tokens: TokenBlock | None
    """None for another model, whose tokens are unknown."""


class EndedPlay(msgspec.Struct, frozen=True, tag="ended"):
    """The result of an attempt, for each agent."""

    id: str
    agent: str
    status: str
    error: str
    judged: bool
    reward: float
    parts: dict[str, float]
    success: bool
    truncated: bool
    turns: int
    tokens: int
    seconds: float
    ending: list[WorldPiece] = []
    """The last observation."""


class FailedPlay(msgspec.Struct, frozen=True, tag="failed"):
    """A request was refused, or failed."""

    id: str
    error: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request has no further events."""

    id: str


Event = (
    Loading
    | Ready
    | Beat
    | Broken
    | Text
    | Replied
    | Began
    | Called
    | Turned
    | EndedPlay
    | FailedPlay
    | Done
)
