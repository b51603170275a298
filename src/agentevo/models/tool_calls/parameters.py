"""Parameters that a notation writes bare, between tags, as JSON by the tool's own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CHOICES = 8
"""Choices of a schema (anyOf, oneOf) within one another that are looked into."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_ANY = frozenset({"object", "array", "integer", "number", "boolean", "null"})


class ParameterTypes:
    """What types the tools' parameters may have, from schemas in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            schema = function.get("parameters") or {}
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            if isinstance(properties, Mapping):
                self._properties[str(function.get("name"))] = properties

    def json_of(self, tool: str, parameter: str, value: str) -> str:
        """The value as JSON: a string where the schema says so, and what else it says where the
        text can be read as that. A parameter without a schema is what its text says as JSON, and
        a string where it says nothing."""
        types = _types(self._properties.get(tool, {}).get(parameter))
        others = types - {"string"} if types else _ANY
        plain = value.strip()
        if others:
            word = _PYTHON_WORDS.get(plain, plain) if types else plain
            kind = _kind(word)
            if kind in others or (kind == "integer" and "number" in others):
                return word

        return json_text(value)


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The types that a schema allows; empty where it does not say, or only too deep inside."""
    if not isinstance(schema, Mapping) or depth > MAX_CHOICES:
        return frozenset()

    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set()
    if isinstance(kinds, list):
        types |= {kind for kind in kinds if isinstance(kind, str)}

    for choice in ("anyOf", "oneOf"):
        options = schema.get(choice)
        for option in options if isinstance(options, list) else ():
            types |= _types(option, depth + 1)

    if schema.get("nullable") is True and types:
        types.add("null")

    return frozenset(types)


def _kind(text: str) -> str | None:
    """The JSON type of a text, None where it is no JSON or a string."""
    if text in ("true", "false"):
        return "boolean"
    if text == "null":
        return "null"
    if _INTEGER.fullmatch(text):
        return "integer"

    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None

    kinds = {dict: "object", list: "array", float: "number"}
    return kinds.get(type(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def json_text(value: object) -> str:
    """A value as JSON that any encoder takes. Raises ValueError for what JSON can't say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value, allow_nan=False)
    return text
