"""The bodies of requests, bounded in length and time, and of answers: JSON."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from agentevo.agents.gateway.refusals import Refusal

BODY_S = 30.0
"""The time limit for a request's body, in seconds."""
_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""msgspec's names of types, which are Python's, in JSON's words."""
_TYPES = re.compile(r"(Expected|got) `([a-z |]+)`")

_ENCODER = msgspec.json.Encoder(enc_hook=lambda column: column.tolist())  # columns of turns

T = TypeVar("T")


async def read_body(
    request: Request, max_bytes: int, *, of: str, within_s: float | None = None
) -> bytes:
    """The whole body, which must arrive `within_s`, by default BODY_S. Raises Refusal for a body
    that is too long or late; `of` names the bound."""
    body = bytearray()
    too_long = refuse_length(max_bytes, of)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_long

    within_s = BODY_S if within_s is None else within_s
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        raise Refusal(f"the body did not arrive within {within_s:g} s", status=408) from None

    return bytes(body)


def refuse_length(max_bytes: int, of: str) -> Refusal:
    """The refusal of a body that is too long; `of` names the bound."""
    return Refusal(f"the body is longer than {max_bytes} bytes ({of}): send less", status=413)


async def json_body(
    request: Request, max_bytes: int, *, of: str, may_be_empty: bool = False
) -> dict[str, Any]:
    """The request's body as an object; an empty one has no keys if it `may_be_empty`. Raises
    Refusal for a body that is too long, late or not an object; `of` names the bound."""
    body = await read_body(request, max_bytes, of=of)
    return {} if may_be_empty and not body else object_of(body)


def object_of(body: bytes) -> dict[str, Any]:
    """A body as an object. Raises Refusal for one that is not."""
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


def json_response(content: object, status: int = 200) -> Response:
    """An answer in JSON."""
    body = _ENCODER.encode(content)
    return Response(body, status_code=status, media_type="application/json")
