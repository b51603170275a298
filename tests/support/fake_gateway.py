"""A gateway for tests of agents: a real HTTP server that notes what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from remote_server import LoopbackServer, chat, gives

from agentevo.agents.policy import AttemptSession


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    """With names in lower case."""
    body: Any

    @property
    def session(self) -> str | None:
        return self.headers.get("x-agentevo-session")


@dataclass(frozen=True)
class Posted:
    """See PostedReward in agents/policy.py."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    turn: int | None = None
    agent: str | None = None


class FakeGateway(LoopbackServer):
    """Answers every request of a model with one chat completion, and takes rewards. `on_call` is
    told the key of each call."""

    def __init__(self, on_call: Callable[[str], object] = lambda key: None) -> None:
        super().__init__()
        self.received: list[Received] = []
        self.sessions: dict[str, AttemptSession] = {}
        self._on_call = on_call

    def open(self, conversations: Any, remote: Any = None, agents: Any = None) -> AttemptSession:
        """See Door in agents/policy.py."""
        key = f"key-{len(self.sessions)}"
        self.sessions[key] = AttemptSession(self.url, key)
        return self.sessions[key]

    def end(self, session: Any) -> None:
        """See Door."""

    def respond(self, body: Any, headers: dict[str, str], handler: BaseHTTPRequestHandler) -> None:
        received = Received(handler.path, headers, body)
        self.received.append(received)
        if received.path.startswith("/s/"):
            self.sessions[received.path.split("/")[2]].posted.append(Posted(**body))
            gives({})(body, handler)
            return

        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        self._on_call(received.session or headers.get("x-api-key") or bearer)
        gives(chat("left"))(body, handler)
