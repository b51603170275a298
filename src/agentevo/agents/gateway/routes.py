"""A part of the gateway's routes: those of the APIs (api_routes.py), or those that a command adds.
The application (app.py) finds out who sends a request, and answers it through these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request, Response

from agentevo.agents.gateway import apis
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.session import GatewaySession

Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request, or raises the reason why it does not."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid key."""

    session: GatewaySession | None = None
    """The session that the key belongs to; None for the key of the whole server."""


class GatewayRoute(NamedTuple):
    """One route."""

    method: str
    path: str
    handler: Handler
    page: Mapping[str, Any] | None = None
    """Its entry in the OpenAPI page, as FastAPI's arguments; None leaves it out."""


class Routes(ABC):
    """See the module."""

    prefixes: tuple[str, ...] = ()
    """Beginnings of their paths, such as "/sessions"."""
    schemas: Mapping[str, Any] = MappingProxyType({})
    """The schemas that their entries in the OpenAPI page refer to."""
    close_s: float = 0.0
    """The time limit of `close`, in seconds."""

    @abstractmethod
    def table(self) -> Iterable[GatewayRoute]: ...

    @abstractmethod
    async def find_caller(self, key: str, path: str) -> Caller | None:
        """The owner of the key, if these routes are open to it at this path. Raises EngineError if
        that can't be found out."""

    @abstractmethod
    def refuse_stranger(self) -> Refusal:
        """The refusal for a request without a valid key."""

    def failure_response(self, request: Request, error: Exception) -> Response:
        """The answer to a request that failed: by default in the form of the client's API."""
        return apis.failure_response(request, error)

    async def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends their work before the server ends."""


def session_of(request: Request) -> GatewaySession:
    """The session whose key a request has."""
    caller: Caller = request.scope["state"]["caller"]
    assert caller.session is not None
    return caller.session
