"""The gateway's own OpenAPI page: its routes, their bodies and their keys. The provider of each API
documents its fields; docs/gateway.md describes the effect of each field in this gateway."""

from __future__ import annotations

from collections.abc import Mapping
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
_SAMPLING = {"temperature": NUMBER, "top_p": SHARE, "top_k": {"type": ["integer", "null"]}}
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
BODIES: dict[str, Schema] = {
    "/chat/completions": _object(
        ["messages"],
        model=TEXT,
        messages=_MESSAGES | {"items": _message("system", "developer", "user", "assistant")},
        tools=OBJECTS,
        n={"type": ["integer", "null"], "minimum": 1, "maximum": 8},
        max_tokens=COUNT,
        seed={"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        stop={"anyOf": [TEXT, {"type": ["array", "null"], "items": TEXT}]},
        logprobs=FLAG,
        top_logprobs=ALTERNATIVES,
        return_token_ids=FLAG,
        stream=FLAG,
        stream_options={"type": ["object", "null"], "properties": {"include_usage": FLAG}},
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/completions": _object(
        ["prompt"],
        model=TEXT,
        prompt={
            "anyOf": [
                TEXT,
                {"type": "array", "minItems": 1, "items": TEXT},
                {"type": "array", "minItems": 1, "items": TOKEN},
                {"type": "array", "minItems": 1, "items": TOKENS},
            ]
        },
        echo=FLAG,
        n={"type": ["integer", "null"], "minimum": 1, "maximum": 8},
        max_tokens=COUNT,
        seed={"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        stop={"anyOf": [TEXT, {"type": ["array", "null"], "items": TEXT}]},
        logprobs=ALTERNATIVES,
        return_token_ids=FLAG,
        stream=FLAG,
        stream_options={"type": ["object", "null"], "properties": {"include_usage": FLAG}},
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/responses": _object(
        ["input"],
        model=TEXT,
        input={"anyOf": [TEXT, {"type": "array", "items": OBJECT}]},
        instructions={"type": ["string", "null"]},
        previous_response_id={"type": ["string", "null"]},
        tools=OBJECTS,
        max_output_tokens=COUNT,
        include={"type": ["array", "null"], "items": {"enum": ["message.output_text.logprobs"]}},
        top_logprobs=ALTERNATIVES,
        store=FLAG,
        stream=FLAG,
        **_SAMPLING,
        **_PENALTIES,
    ),
    "/messages": _object(
        ["messages", "max_tokens"],
        model=TEXT,
        messages=_MESSAGES | {"items": _message("user", "assistant", "system")},
        system={"anyOf": [TEXT, {"type": ["array", "null"], "items": OBJECT}]},
        tools=OBJECTS,
        max_tokens={"type": "integer", "minimum": 1},
        stop_sequences={"type": ["array", "null"], "items": TEXT},
        stream=FLAG,
        **_SAMPLING,
    ),
    "/messages/count_tokens": _object(
        ["messages"],
        model=TEXT,
        messages=_MESSAGES | {"items": _message("user", "assistant", "system")},
        system={"anyOf": [TEXT, {"type": ["array", "null"], "items": OBJECT}]},
        tools=OBJECTS,
    ),
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
    400: "The request is not valid.",
    401: "No key, a wrong one, or one whose attempt has ended.",
    404: "An answer that the session does not have.",
    408: "The body did not arrive in time.",
    409: "The attempt was broken off while the request waited.",
    413: "The body is too long.",
    429: "Too many requests of one session at once, or in a second.",
    503: "No engine is available.",
    504: "No engine answers in time.",
}


def route_arguments(summary: str) -> dict[str, Any]:
    """The arguments of FastAPI's decorator for a route that takes no body and needs a key."""
    return {
        "summary": summary,
        "responses": {status: {"description": _FAILURES[status]} for status in (401, 429)},
        "openapi_extra": {"security": SECURITY},
    }


def of_model() -> dict[str, Any]:
    """The same for a model by its name."""
    arguments = route_arguments("A model")
    arguments["responses"] |= {404: {"description": "There is no such model."}}
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    arguments["openapi_extra"] = arguments["openapi_extra"] | {"parameters": [name]}
    return arguments


def of_kept(summary: str) -> dict[str, Any]:
    """The same for an answer that is kept."""
    arguments = route_arguments(summary)
    arguments["responses"] |= {status: {"description": _FAILURES[status]} for status in (400, 404)}
    name = {"name": "response_id", "in": "path", "required": True, "schema": TEXT}
    arguments["openapi_extra"] = arguments["openapi_extra"] | {"parameters": [name]}
    return arguments


def describe(path: str, summary: str, *, events: bool = False) -> dict[str, Any]:
    """The arguments of FastAPI's decorator for a route that takes a body; its path is below /v1.
    `events`: its answer may be a stream."""
    error = {"application/json": {"schema": OBJECT}}
    answer = {"application/json": {"schema": OBJECT}}
    if events:
        answer["text/event-stream"] = {"schema": TEXT}

    body = {"application/json": {"schema": BODIES[path]}}
    key = {"name": "key", "in": "path", "required": True, "schema": TEXT}
    return {
        "summary": summary,
        "responses": {200: {"description": "The answer.", "content": answer}}
        | {status: {"description": text, "content": error} for status, text in _FAILURES.items()},
        "openapi_extra": {
            "requestBody": {"required": True, "content": body},
            # A key in the path is all that a reward needs.
            **({"parameters": [key]} if path == "/reward" else {"security": SECURITY}),
        },
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
