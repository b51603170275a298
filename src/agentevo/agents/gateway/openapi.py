"""The gateway's own OpenAPI page: its routes, their bodies and their keys. The provider of each API
documents its fields; docs/gateway.md describes the effect of each field in this gateway."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
NUMBER: Schema = {"type": ["number", "null"], "minimum": 0}
OBJECT: Schema = {"type": "object"}
ALTERNATIVES: Schema = {"type": ["integer", "null"], "minimum": 0, "maximum": 20}
TOKEN: Schema = {"type": "integer", "minimum": 0}
TOKENS: Schema = {"type": "array", "minItems": 1, "items": TOKEN}
OBJECTS: Schema = {"type": ["array", "null"], "items": OBJECT}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _message(*roles: str) -> Schema:
    content = {"anyOf": [TEXT, {"type": "array", "items": OBJECT}]}
    return _object(["role", "content"], role={"enum": list(roles)}, content=content)


SHARE: Schema = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}
PENALTY: Schema = {"type": ["number", "null"], "minimum": -2, "maximum": 2}
BIAS: Schema = {"type": "number", "minimum": -100, "maximum": 100}
_SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "temperature": NUMBER,
    "top_p": SHARE,
    "top_k": {"type": ["integer", "null"]},
}
_PENALTIES: dict[str, Schema] = {
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": {"type": ["number", "null"], "minimum": 0.01, "maximum": 100},
    "logit_bias": {
        "type": ["object", "null"],
        "patternProperties": {"^[0-9]{1,9}$": BIAS},
        "additionalProperties": False,
    },
}
_MESSAGES = {"type": "array", "minItems": 1}
_PROMPTS = [{"type": "array", "minItems": 1, "items": item} for item in (TEXT, TOKEN, TOKENS)]
_OF_COMPLETIONS: dict[str, Schema] = {
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 8},
    "max_tokens": COUNT,
    "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": {"anyOf": [TEXT, {"type": ["array", "null"], "items": TEXT}]},
    "return_token_ids": FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": FLAG}},
}
_OF_ANTHROPIC: dict[str, Schema] = {
    "messages": _MESSAGES | {"items": _message("user", "assistant", "system")},
    "system": {"anyOf": [TEXT, {"type": ["array", "null"], "items": OBJECT}]},
    "tools": OBJECTS,
}
BODIES: dict[str, Schema] = {
    "/chat/completions": _object(
        ["messages"],
        messages=_MESSAGES | {"items": _message("system", "developer", "user", "assistant")},
        tools=OBJECTS,
        logprobs=FLAG,
        top_logprobs=ALTERNATIVES,
        **_OF_COMPLETIONS,
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/completions": _object(
        ["prompt"],
        prompt={"anyOf": [TEXT, *_PROMPTS]},
        echo=FLAG,
        logprobs=ALTERNATIVES,
        **_OF_COMPLETIONS,
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/responses": _object(
        ["input"],
        input={"anyOf": [TEXT, {"type": "array", "items": OBJECT}]},
        instructions={"type": ["string", "null"]},
        previous_response_id={"type": ["string", "null"]},
        tools=OBJECTS,
        max_output_tokens=COUNT,
        include={"type": ["array", "null"], "items": {"enum": ["message.output_text.logprobs"]}},
        top_logprobs=ALTERNATIVES,
        store=FLAG,
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/messages": _object(
        ["messages", "max_tokens"],
        max_tokens={"type": "integer", "minimum": 1},
        stop_sequences={"type": ["array", "null"], "items": TEXT},
        **_OF_ANTHROPIC,
        **_SAMPLING,
    ),
    "/messages/count_tokens": _object(["messages"], model=TEXT, **_OF_ANTHROPIC),
    "/reward": _object(
        [],
        reward={"type": ["number", "null"]},
        rewards={"type": "object", "additionalProperties": {"type": "number"}},
        turn={"type": ["integer", "null"], "minimum": 0},
    )
    | {"additionalProperties": False},
}
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
_FAILURES = {
    401: "The key is missing, or is not valid here.",
    429: "Too many requests, sessions or rewards.",
    503: "The gateway is starting, or no engine is available.",
    504: "No answer in time.",
}
_FAILURES_OF_BODY = {
    400: "The request is not valid.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
}


def describe(
    summary: str,
    answer: Schema = OBJECT,
    *,
    body: Schema | None = None,
    needs_body: bool = True,
    in_path: str = "",
    events: bool = False,
    status: int = 200,
    failure: Schema = OBJECT,
    failures: Mapping[int, str] = MappingProxyType({}),
    links: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The arguments of FastAPI's decorator for a route. `in_path`: the parameter of its path;
    `events`: its answer may be a stream; `failures`: what fails in addition to the failures that
    every route has; `links`: from its answer to other routes."""
    content = {"application/json": {"schema": answer}}
    if events:
        content["text/event-stream"] = {"schema": TEXT}

    success: dict[str, Any] = {"description": "The answer.", "content": content}
    if links:
        success["links"] = links

    has_key = in_path == "key"
    extra: dict[str, Any] = {} if has_key else {"security": SECURITY}
    if body is not None:
        sent = {"application/json": {"schema": body}}
        extra["requestBody"] = {"required": needs_body, "content": sent}
    if in_path:
        name = {"name": in_path, "in": "path", "required": True, "schema": TEXT}
        extra["parameters"] = [name]

    all_failures = {**({} if body is None else _FAILURES_OF_BODY), **_FAILURES, **failures}
    error = {"application/json": {"schema": failure}}
    return {
        "summary": summary,
        "status_code": status,
        "responses": {status: success}
        | {
            code: {"description": text, "content": error}
            for code, text in sorted(all_failures.items())
        },
        "openapi_extra": extra,
    }


def page(app: FastAPI, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The page of the application's routes, with the schemas that they refer to."""
    document = dict(app.openapi())
    document["components"] = {
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
        **({"schemas": schemas} if schemas else {}),
    }
    return document
