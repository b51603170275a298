"""The protocol between a server for programs' loops and its clients: paths, records that only this
protocol uses, and failures by name."""

from __future__ import annotations

from typing import Any

import msgspec

from agentevo import errors
from agentevo.agents.gateway.refusals import Refusal, refusal_of
from agentevo.api.loop.records import ModelNotOpenError, SealError, UnknownAttemptError
from agentevo.errors import AgentEvoError, EngineUnavailableError

PREFIX = "/loop/v1/models"
NOT_READY_STATUS = 202
"""The HTTP status if the answer is not ready. The client repeats the request to wait longer."""
WAIT_S = 20.0
"""The longest wait of a request before the server answers NOT_READY_STATUS."""
NAME = r"\w[\w.-]{0,99}"
"""The form of a model's name."""


class OpenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model's training."""

    sections: dict[str, Any] = {}


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    greedy: bool = False


class CreatedId(msgspec.Struct, frozen=True, kw_only=True):
    """The id of a new group or submission."""

    id: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    is_open: bool


class WireFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the server, by the name of its type."""

    type: str
    message: str


_ERROR_TYPES: dict[str, type[AgentEvoError]] = {
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
"""The HTTP status of errors that the gateway's APIs do not have."""
_REFUSALS: dict[int, type[AgentEvoError]] = {
    401: errors.ConfigError,
    503: EngineUnavailableError,
}
"""Status of a refusal by the HTTP application -> the client's error, if not BadRequestError."""


def failure_of(error: BaseException) -> tuple[int, WireFailure]:
    """The HTTP status and the body for an error."""
    status = _STATUSES.get(type(error)) or refusal_of(error).status
    if isinstance(error, Refusal):
        kind = _REFUSALS.get(status, errors.BadRequestError).__name__
    elif isinstance(error, AgentEvoError):
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERROR_TYPES)
    else:
        return status, WireFailure(type="EngineError", message=errors.describe_error(error))
    return status, WireFailure(type=kind, message=errors.storable(str(error)))


def error_of(failure: WireFailure) -> AgentEvoError:
    """The exception of a failure, of the same type as on the server."""
    return _ERROR_TYPES.get(failure.type, AgentEvoError)(failure.message)
