"""A group of the gateway's routes: the routes of the APIs (api_routes.py), or routes that a command
adds. The application (app.py) identifies the sender of a request and calls the route's handler."""

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
"""Answers a request, or raises an error for `Routes.failure_response`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid key."""

    session: GatewaySession | None = None
    """The session of the key. None for the key of the whole server."""


class GatewayRoute(NamedTuple):
    """One route."""

    method: str
    path: str
    handler: Handler
    page: Mapping[str, Any] | None = None
    """FastAPI's arguments for the route's entry in the OpenAPI page. None for no entry."""


class Routes(ABC):
    """A group of routes with the same keys and the same form of errors."""

    prefixes: tuple[str, ...] = ()
    """The beginnings of the routes' paths, such as "/sessions"."""
    schemas: Mapping[str, Any] = MappingProxyType({})
    """The schemas for the routes' entries in the OpenAPI page."""
    close_s: float = 0.0
    """The time limit of `close`, in seconds."""

    @abstractmethod
    def table(self) -> Iterable[GatewayRoute]: ...

    @abstractmethod
    async def find_caller(self, key: str, path: str) -> Caller | None:
        """The owner of the key, or None if the key is not valid for the path. Raises EngineError if
        the key can't be checked."""

    @abstractmethod
    def refuse_stranger(self) -> Refusal:
        """The refusal for a request without a valid key."""

    def failure_response(self, request: Request, error: Exception) -> Response:
        """The answer to a failed request. The default is the form of the client's API."""
        return apis.failure_response(request, error)

    async def close(self) -> None:  # noqa: B027 (optional: most groups have nothing to close)
        """Ends the routes' work before the server ends."""


def session_of(request: Request) -> GatewaySession:
    """The session of a request's key."""
    caller: Caller = request.scope["state"]["caller"]
    assert caller.session is not None
    return caller.session
