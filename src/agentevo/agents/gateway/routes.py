"""A group of the gateway's routes: the routes of the APIs (api_routes.py), or routes that a command
adds. The application (app.py) identifies the sender of a request and calls the route's handler.

The APIs of the gateway, and the form that each has for failures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request, Response

from agentevo.agents.gateway import (
    anthropic_messages,
    chat_completions,
    completions,
    responses,
)
from agentevo.agents.gateway.api import Api
from agentevo.agents.gateway.body import json_response
from agentevo.agents.gateway.rate_limit import retry_headers
from agentevo.agents.gateway.refusals import Refusal, refusal_of
from agentevo.agents.gateway.session import GatewaySession

APIS: tuple[Api[Any], ...] = (
    chat_completions.API,
    completions.API,
    responses.API,
    anthropic_messages.API,
)
"""The form of the first applies to requests outside of all APIs."""


def failure_response(request: Request, error: Exception) -> Response:
    """The answer to a request that failed, in the form of the client's API."""
    api = _api_of(request)
    refusal = refusal_of(error)
    status = api.statuses.get(refusal.status, refusal.status)
    response = json_response(api.error(refusal), status)
    response.headers.update(retry_headers(refusal))
    return response


def _api_of(request: Request) -> Api[Any]:
    if "anthropic-version" in request.headers:
        return anthropic_messages.API
    return next((api for api in APIS if api.path in request.url.path), APIS[0])


Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request, or raises an error for `Routes.failure_response`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid key."""

    session: GatewaySession | None = None
    """The session of the key. None for the key of the whole server."""


class GatewayRoute(NamedTuple):
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
        return failure_response(request, error)

    async def close(self) -> None:  # noqa: B027 (optional: most groups have nothing to close)
        """Ends the routes' work before the server ends."""


def session_of(request: Request) -> GatewaySession:
    """The session of a request's key."""
    caller: Caller = request.scope["state"]["caller"]
    assert caller.session is not None
    return caller.session
