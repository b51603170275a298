"""Calls each tool of a toolbox once, with arguments made from its schema, and reports the result,
the time and the failure."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.tools import ToolSection
from agentevo.models.tool_calls.parameters import resolve_references
from agentevo.types import Task, ToolCall

DEPTH = 6
"""The maximum depth of generated objects and lists; deeper ones are empty."""
_BROKEN = ("num_tool_failures", "num_tool_timeouts", "num_unknown_tools")
_REFUSED = ("num_wrong_arguments",)
_TEXTS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "someone@example.com",
    "uri": "http://example.com/",
}
"""Format -> an example text."""


class TriedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    name: str
    arguments: str
    text: str
    """The result, as a policy reads it."""
    seconds: float
    status: Literal["answered", "error", "refused", "broken"]
    """`error`: the tool returned an error. `refused`: the arguments were wrong. `broken`: no
    answer, or an exception of the tool's code."""


async def try_calls(
    sections: Sequence[ToolSection], task: Task, calls: Sequence[ToolCall] = ()
) -> AsyncIterator[TriedCall]:
    """Makes these calls one after the other in one session; without any, one call of each tool.
    Raises the errors of opening the tools."""
    toolbox = Toolbox(sections)
    try:
        async with toolbox.open(task, seed=0) as tools:
            for call in calls or [made_call(schema) for schema in tools.schemas]:
                before = dict(tools.metrics)
                started = time.monotonic()
                (result,) = await tools.call([call])
                rose = {key for key, n in tools.metrics.items() if n > before.get(key, 0)}
                status: Literal["answered", "error", "refused", "broken"] = (
                    "broken"
                    if rose.intersection(_BROKEN)
                    else "refused"
                    if rose.intersection(_REFUSED)
                    else "error"
                    if result.is_error
                    else "answered"
                )
                yield TriedCall(
                    name=call.name,
                    arguments=call.arguments,
                    text=result.text,
                    seconds=time.monotonic() - started,
                    status=status,
                )
    finally:
        await toolbox.close()


def made_call(schema: Mapping[str, Any]) -> ToolCall:
    """A call of a tool, made from its schema in OpenAI's form."""
    function = schema["function"]
    parameters = function["parameters"]
    arguments = made_value(parameters, parameters)
    return ToolCall(function["name"], json.dumps(arguments, ensure_ascii=False))


def made_value(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A value that a JSON schema allows, the same each time: a default, an example or a choice from
    the schema, else the simplest value. An object has its required properties. `root` is the schema
    that references point into."""
    schema = resolve_references(schema, root)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]

    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]

    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            return made_value(choices[0], root, depth + 1) if depth < DEPTH else None

    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind is None and "properties" in schema:
        kind = "object"

    return _of_kind(kind, schema, root, depth)


def _of_kind(kind: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    if kind == "object":
        properties = schema.get("properties") or {}
        needed = schema.get("required") or []
        if depth >= DEPTH or not isinstance(properties, Mapping) or not isinstance(needed, list):
            return {}
        return {name: made_value(properties.get(name, {}), root, depth + 1) for name in needed}

    if kind == "array":
        count = max(1, _number(schema, "minItems", 0))
        if depth >= DEPTH:
            return []
        return [made_value(schema.get("items", {}), root, depth + 1)] * min(int(count), 10)

    if kind in ("integer", "number"):
        lowest = _number(schema, "minimum", _number(schema, "exclusiveMinimum", 0) + 1)
        number = min(lowest, _number(schema, "maximum", lowest))
        return int(number) if kind == "integer" else float(number)

    if kind == "boolean":
        return True
    if kind == "null":
        return None

    shortest = int(min(_number(schema, "minLength", 0), 1000))
    text = _TEXTS.get(str(schema.get("format")), "test").ljust(shortest, "t")
    return text[: max(0, int(_number(schema, "maxLength", len(text))))]


def _number(schema: Mapping[str, Any], key: str, default: float) -> float:
    value = schema.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and value is not None and abs(value) < 1e15 else default
