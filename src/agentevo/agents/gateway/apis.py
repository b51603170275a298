"""The APIs of the gateway, and the form that each has for failures."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from agentevo.agents.gateway import anthropic_messages, chat_completions, completions, responses
from agentevo.agents.gateway.api import Api
from agentevo.agents.gateway.body import json_response
from agentevo.agents.gateway.rate_limit import retry_headers
from agentevo.agents.gateway.refusals import refusal_of

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
