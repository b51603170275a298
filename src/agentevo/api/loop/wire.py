"""The protocol of a server for programs' loops and its clients: paths, records that only travel
between them, and failures by name."""

from __future__ import annotations

from typing import Any

import msgspec

from agentevo import errors
from agentevo.agents.gateway.refusals import Refusal, refusal_of
from agentevo.api.loop.errors import ModelNotOpenError, SealError, UnknownAttemptError
from agentevo.errors import AgentEvoError, EngineUnavailableError

PREFIX = "/loop/v1/models"
ASK_AGAIN = 202
"""Status of an answer that is not ready yet: the client repeats the request to wait longer."""
WAIT_S = 20.0
"""How long a request is kept waiting before that answer."""
NAME = r"\w[\w.-]{0,99}"
"""The form of a model's name."""


class OpenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model's training."""

    sections: dict[str, Any] = {}


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a group."""

    task_id: str
    greedy: bool = False


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a new group or submission."""

    id: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a server."""

    name: str
    is_open: bool


class WireFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure."""

    type: str
    message: str


_OURS: dict[str, type[AgentEvoError]] = {
    kind.__name__: kind
    for kind in (
        *(value for value in vars(errors).values() if isinstance(value, type)),
        ModelNotOpenError,
        SealError,
        UnknownAttemptError,
    )
    if issubclass(kind, AgentEvoError) and kind is not errors.OverreachError
}
_STATUSES: dict[type[BaseException], int] = {
    UnknownAttemptError: 404,
    ModelNotOpenError: 404,
    SealError: 400,
}
"""The HTTP status of failures that the gateway's APIs do not have."""
_REFUSALS: dict[int, type[AgentEvoError]] = {
    401: errors.ConfigError,
    503: EngineUnavailableError,
}
"""Status of a refusal by the HTTP application -> the client's error, if not BadRequestError."""


def failure_of(error: BaseException) -> tuple[int, WireFailure]:
    """The HTTP status and the body."""
    status = _STATUSES.get(type(error)) or refusal_of(error).status
    if isinstance(error, Refusal):
        kind = _REFUSALS.get(status, errors.BadRequestError).__name__
    elif isinstance(error, AgentEvoError):
        kind = next(k.__name__ for k in type(error).__mro__ if k.__name__ in _OURS)
    else:
        return status, WireFailure(type="EngineError", message=errors.describe_error(error))
    return status, WireFailure(type=kind, message=errors.storable(str(error)))


def error_of(failure: WireFailure) -> AgentEvoError:
    """The failure as the exception that it was on the server."""
    return _OURS.get(failure.type, AgentEvoError)(failure.message)
