"""The protocol of a server for programs' loops and its clients: paths, records that only travel
between them, and failures by name."""

from __future__ import annotations

from typing import Any

import msgspec

from agentevo import errors
from agentevo.errors import AgentEvoError, EngineUnavailableError
from agentevo.gateway.refusals import Refusal
from agentevo.loop.errors import ModelNotOpenError, SealError, UnknownAttemptError

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
_STATUSES: tuple[tuple[type[AgentEvoError], int], ...] = (
    (UnknownAttemptError, 404),
    (ModelNotOpenError, 404),
    (errors.DeadlineExceededError, 504),
    (errors.RequestTooLongError, 400),
    (errors.GrammarError, 400),
    (EngineUnavailableError, 503),
    (errors.StoreUnavailableError, 503),
    (errors.ConfigError, 400),
    (errors.BadRequestError, 400),
    (errors.StoreError, 400),
    (SealError, 400),
)

_REFUSALS: dict[int, type[AgentEvoError]] = {
    401: errors.ConfigError,
    503: EngineUnavailableError,
}
"""Status of a refusal by the HTTP application -> the client's error, if not BadRequestError."""


def failure_of(error: BaseException) -> tuple[int, WireFailure]:
    """The HTTP status and the body."""
    if isinstance(error, Refusal):
        kind = _REFUSALS.get(error.status, errors.BadRequestError).__name__
        return error.status, WireFailure(type=kind, message=str(error))
    if not isinstance(error, AgentEvoError):
        return 500, WireFailure(type="EngineError", message=errors.describe_error(error))
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _OURS), "AgentEvoError")
    return status, WireFailure(type=kind, message=errors.storable(str(error)))


def error_of(failure: WireFailure) -> AgentEvoError:
    """The failure as the exception that it was on the server."""
    return _OURS.get(failure.type, AgentEvoError)(failure.message)
