"""The gateway's refusals and their HTTP status. Every API has its own form for them."""

from __future__ import annotations

import asyncio

from agentevo.errors import (
    AgentEvoError,
    BadRequestError,
    DeadlineExceededError,
    EngineUnavailableError,
    GrammarError,
    ModelError,
    RequestTooLongError,
)
from agentevo.remote_models.ledger import BudgetExceededError, RemoteModelError


class Refusal(AgentEvoError):
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


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that the client gets for a failure. An unexpected failure is a 500 without
    details of the process."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestTooLongError):
        return Refusal(str(error), code="context_length_exceeded")
    if isinstance(error, (BadRequestError, GrammarError, ModelError)):
        return Refusal(str(error))
    if isinstance(error, RecursionError):  # json's own limit, which depends on the caller's depth
        return Refusal("the request is nested too deeply: give lists and objects fewer levels")
    if isinstance(error, (DeadlineExceededError, TimeoutError)):
        return Refusal(str(error) or "no answer in time", status=504, kind="timeout_error")
    if isinstance(error, EngineUnavailableError):
        return Refusal(str(error), status=503, kind="server_error")

    if isinstance(error, RemoteModelError):  # 424: asked often enough, so clients don't again
        code = "budget_exceeded" if isinstance(error, BudgetExceededError) else ""
        return Refusal(str(error), status=424, kind="server_error", code=code)

    if isinstance(error, asyncio.CancelledError):
        return Refusal(
            "the attempt was broken off", status=409, kind="invalid_request_error", code="cancelled"
        )

    return Refusal(f"{type(error).__name__}: {error}", status=500, kind="server_error")
