"""The messages between a dashboard and a player (`player.py`): a JSON object on each line, requests
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
"""Of all messages of a request together; also of a query."""
MAX_TOKENS = 4096
"""Longest reply."""
MAX_TEXT = 4_000
"""Characters of what a call was given or gave, and of any error."""
START = "start"
"""The name of the weights that the run began with, next to the steps of its checkpoints."""

Id = Annotated[str, msgspec.Meta(pattern=r"^[\w-]{1,64}$")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=10.0)]


class Chat(msgspec.Struct, frozen=True, tag="chat", forbid_unknown_fields=True):
    """Answer the last message."""

    id: Id
    conversation: Id
    """Requests of one conversation continue its recorded tokens."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Temperature = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256


class Play(msgspec.Struct, frozen=True, tag="play", forbid_unknown_fields=True):
    """Play one attempt: at `task`, else at `query`, else at the `number`-th held-out task, or of
    those to train on."""

    id: Id
    task: Task | None = None
    query: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None
    answer: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None
    is_train: bool = False
    number: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    draw: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    """Another one draws other tokens at the same task; with the same one two models have the same
    seed."""
    temperature: Temperature = 1.0


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """Break off the request of that id."""

    id: Id


Request = Chat | Play | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What it does before it is ready."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    seconds: float
    parameters: int
    device: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """It lives."""

    memory_bytes: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """It ends for this reason."""

    error: str


class Text(msgspec.Struct, frozen=True, tag="text"):
    """More of a reply."""

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
    """What will judge it; empty for nothing."""


class Called(msgspec.Struct, frozen=True, tag="called"):
    """A call begins (`took_s` is None), or has ended."""

    id: str
    number: int
    """Of the call, from 0, in the attempt."""
    kind: str
    name: str
    took_s: float | None = None
    status: str = ""
    texts: list[tuple[str, str]] = []
    """(what, text): its input, its result."""


class Turned(msgspec.Struct, frozen=True, tag="turned"):
    """The policy has answered; `number` is the number of its call."""

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
    """What the world showed at last."""


class FailedPlay(msgspec.Struct, frozen=True, tag="failed"):
    """A request could not be followed, or failed."""

    id: str
    error: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """This request has no further events."""

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
