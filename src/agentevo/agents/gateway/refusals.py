"""The gateway's refusals and their HTTP status. Every API has its own form for them."""

from __future__ import annotations

import asyncio

from agentevo import errors
from agentevo.inference.remote_models.ledger import BudgetExceededError, RemoteModelError


class Refusal(errors.AgentEvoError):
    """A request that gets no completion, with the status of HTTP, the kind in OpenAI's words, and,
    if there are any, a code, the name of the wrong field and the time until a retry."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str = "",
        param: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


_INVALID = "invalid_request_error"
_KINDS: tuple[tuple[type[BaseException], int, str, str], ...] = (
    (errors.RequestTooLongError, 400, _INVALID, "context_length_exceeded"),
    (errors.EngineUnavailableError, 503, "server_error", ""),
    (errors.StoreUnavailableError, 503, "server_error", ""),
    (TimeoutError, 504, "timeout_error", ""),
    (BudgetExceededError, 424, "server_error", "budget_exceeded"),
    (RemoteModelError, 424, "server_error", ""),  # asked often enough, so clients don't again
    (errors.StoreError, 409, _INVALID, ""),
    (errors.BadRequestError, 400, _INVALID, ""),
    (errors.ConfigError, 400, _INVALID, ""),
    (errors.GrammarError, 400, _INVALID, ""),
)
"""Failure -> status, kind and code; the first that fits."""


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that the client gets for a failure. An unexpected failure is a 500 without
    details of the process."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RecursionError):  # json's own limit, which depends on the caller's depth
        return Refusal("the request is nested too deeply: give lists and objects fewer levels")
    if isinstance(error, asyncio.CancelledError):
        return Refusal("the attempt was broken off", status=409, code="cancelled")

    for failure, status, kind, code in _KINDS:
        if isinstance(error, failure):
            message = str(error) or "no answer in time"
            return Refusal(message, status=status, kind=kind, code=code)

    return Refusal(f"{type(error).__name__}: {error}", status=500, kind="server_error")
