"""The body of a request to the gateway: bounded, in time, and a JSON object."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from agentevo.gateway.refusals import Refusal

BODY_S = 30.0
"""The time limit for a request's body, in seconds."""
_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""msgspec's names of types, which are Python's, in JSON's words."""
_TYPES = re.compile(r"(Expected|got) `([a-z |]+)`")

T = TypeVar("T")


async def json_body(
    request: Request, max_bytes: int, *, of: str, may_be_empty: bool = False
) -> dict[str, Any]:
    """The request's body as an object; an empty one has no keys if it `may_be_empty`. Raises
    Refusal for a body that is too long, late or not an object; `of` names the bound."""
    body = bytearray()
    too_long = Refusal(f"the body is longer than {max_bytes} bytes ({of}): send less", status=413)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_long

    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        raise Refusal(f"the body did not arrive within {BODY_S:g} s", status=408) from None

    if may_be_empty and not body:
        return {}

    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error

    if not isinstance(value, dict):
        raise Refusal("the body is not a JSON object")

    return value


def record_of(value: object, kind: type[T], what: str) -> T:
    """A decoded body as such a record. Raises Refusal in JSON's words; `what` names the body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = _TYPES.sub(_in_json_words, str(error))
        raise Refusal(f"{what}: {problem}") from error


def _in_json_words(match: re.Match[str]) -> str:
    words = [_JSON_WORDS.get(word, word) for word in match[2].split(" | ")]
    return f"{match[1]} {' or '.join(words)}"
