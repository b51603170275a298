"""A recorded call of a model, from any recorder, and the common functions of all readers of
records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.data.messages import REASONING_KEYS, is_trained
from agentevo.data.row_report import RowError
from agentevo.errors import BadRequestError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Maps a recorder's name of a role to the role."""
CUT_OFF = {"length", "max_tokens", "max_output_tokens", "content_filter", "incomplete"}
"""The finish reasons of incomplete answers."""


@dataclass
class RecordedCall:
    """A call of a model: the whole history, with the answer at the end."""

    where: str
    messages: list[dict[str, Any]]
    """In OpenAI's form."""
    tools: list[dict[str, Any]] | None = None
    is_given: bool = False
    """Whether the record is a conversation and not a single call. Then every answer is trained."""
    model: str = ""


def message(value: Any) -> dict[str, Any]:
    """Converts a message in OpenAI's form, or a similar one, to the keys of a conversation. Raises
    RowError."""
    if not isinstance(value, Mapping):
        raise RowError("unknown_form", f"a message is a {type(value).__name__}, not an object")

    role = ROLES.get(str(value.get("role")))
    if role is None:
        raise RowError("wrong_roles", f"a message has the role {value.get('role')!r}")

    converted: dict[str, Any] = {"role": role, "content": text_of(value.get("content"))}
    calls = value.get("tool_calls")
    if not calls and value.get("function_call"):
        calls = [value["function_call"]]
    if calls:
        converted["tool_calls"] = calls

    thought = next((value[key] for key in REASONING_KEYS if value.get(key)), None)
    for key, item in (
        (
            "tool_call_id",
            value.get("tool_call_id") or (value.get("id") if role == "tool" else None),
        ),
        ("name", value.get("name")),
        ("reasoning_content", thought),
        ("weight", _weight(value) if role == "assistant" else None),
    ):
        if item is not None:
            converted[key] = item

    return converted


def _weight(message: Mapping[str, Any]) -> int | None:
    """0 for an answer that is marked as untrained, else None. Raises RowError."""
    try:
        return 0 if is_trained(message, "an answer") is False else None
    except BadRequestError as error:
        raise RowError("unknown_form", str(error)) from error


def text_of(content: Any) -> str:
    """A content as one text: None becomes an empty text, and parts of text are joined. Raises
    RowError for any other content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence):
        raise RowError("unknown_form", f"a content is a {type(content).__name__}, not a text")

    texts = []
    for part in content:
        text = part.get("text", part.get("content")) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError("unknown_form", f"a content has a part {kind!r}, which is not text")
        texts.append(text)

    return "".join(texts)


def tools_of(values: Any) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's nesting, from any of the usual forms. Entries that are not functions are
    left out. Raises RowError."""
    values = parse_value(values, "tools")
    if not values:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RowError("bad_tool_call", "tools is not a list of JSON schemas")

    tools = []
    for value in values:
        function = parse_value(value, "a tool")
        function = function.get("function", function) if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            if isinstance(value, Mapping) and value.get("type") not in (None, "function"):
                continue  # a tool of the server itself, such as web_search
            raise RowError("bad_tool_call", "a tool has no name")

        schema = function.get("parameters", function.get("input_schema"))
        described = {key: function[key] for key in ("description",) if function.get(key)}
        kept_fields = {"name": function["name"], **described}
        tools.append(
            {
                "type": "function",
                "function": kept_fields | ({"parameters": schema} if schema else {}),
            }
        )

    return tools or None


def parse_value(value: Any, what: str) -> Any:
    """The value. A text is parsed as JSON. Raises RowError."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None

    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError("not_json", f"{what} can't be read as JSON ({error})") from error


def halves(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The request and the response. Both are the row itself if it combines them or is a
    conversation. Raises RowError."""
    request = row.get("request", row.get("body", row))
    answer = row.get("response", row)
    for _ in range(2):  # a batch wraps both
        request = request.get("body", request) if isinstance(request, Mapping) else request
        answer = answer.get("body", answer) if isinstance(answer, Mapping) else answer

    if not isinstance(request, Mapping):
        raise RowError("unknown_form", "its request is not an object")
    if not isinstance(answer, Mapping):
        raise RowError("failed_call", "it has no answer")
    if answer.get("error"):
        raise RowError("failed_call", f"it failed: {str(answer['error'])[:200]}")

    return request, answer


def objects(value: Mapping[str, Any], key: str) -> list[Any]:
    """The objects under a key. Raises RowError if there are none."""
    items = value.get(key)
    if not isinstance(items, list) or not items:
        raise RowError("empty" if items == [] else "unknown_form", f"{key} is not a list, or empty")
    if not all(isinstance(item, Mapping) for item in items):
        raise RowError("unknown_form", f"{key} has an entry that is not an object")
    return items
