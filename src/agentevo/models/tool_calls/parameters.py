"""Converts parameters that a notation writes without quotes, between tags, to JSON by the tool's
schema.

    the text as JSON, if it is JSON other than a string and the schema allows that value
    the text as a string, elsewhere

A schema allows a value if `type`, `enum` and `const` allow it, and so do the target of `$ref` in
the same schema, all schemas of `allOf`, and one schema each of `anyOf` and `oneOf`. A schema
without constraints, or with constraints that are nested too deep, allows anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 16
"""The deepest nesting of schemas, by choices and references, that is followed."""
MAX_SCHEMAS = 1_000
"""The most schemas that are checked for one value, because references may be circular."""
MAX_REFERENCES = 6
"""The longest chain of references that is resolved."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_KINDS: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


class ParameterTypes:
    """The allowed values of the tools' parameters, from schemas in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            schema = function.get("parameters")
            if isinstance(schema, Mapping):
                self._schemas[str(function.get("name"))] = schema

    def schema_of(self, tool: str) -> Mapping[str, Any]:
        """The schema of the tool's arguments. Empty if it is unknown."""
        return self._schemas.get(tool, {})

    def json_of(self, tool: str, parameter: str, value: str) -> str:
        """`json_by` the schema of the tool."""
        return json_by(self.schema_of(tool), parameter, value)


def json_by(schema: Mapping[str, Any], parameter: str, value: str) -> str:
    """The value of a parameter as JSON, by the schema of all parameters; see the module. Python's
    words for true, false and null are accepted if the schema allows anything."""
    return _json_allowed(_ValueCheck(schema, schema, parameter), value)


def json_of_value(schema: Mapping[str, Any], value: str, root: Mapping[str, Any]) -> str:
    """As `json_by`, by the value's own schema, whose references lead into `root`."""
    return _json_allowed(_ValueCheck(root, schema), value)


def _json_allowed(check: _ValueCheck, value: str) -> str:
    plain = value.strip()
    word = _PYTHON_WORDS.get(plain, plain)
    if word != plain and check.allows(_NOTHING):
        word = plain

    content = _read(word)
    is_json = content is not _NOTHING and check.allows(content)
    return word if is_json else json_text(value)


_NOTHING = object()
"""A value that no schema with any content allows."""


class _ValueCheck:
    """Checks whether a schema within `root` allows a value: for a parameter, if it is the schema of
    all arguments, otherwise for what it describes itself."""

    def __init__(
        self, root: Mapping[str, Any], schema: Mapping[str, Any], parameter: str | None = None
    ) -> None:
        self._root = root
        self._schema = schema
        self._parameter = parameter
        self._num_seen = 0

    def allows(self, value: Any) -> bool:
        self._num_seen = 0
        return self._allows(self._schema, value, is_whole=self._parameter is not None, depth=0)

    def _allows(self, schema: Any, value: Any, *, is_whole: bool, depth: int) -> bool:
        """`is_whole`: whether `schema` is the schema of all arguments, although the value is the
        parameter's."""
        self._num_seen += 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._num_seen > MAX_SCHEMAS:
            return True

        def allows(part: Any, *, is_whole: bool = is_whole) -> bool:
            return self._allows(part, value, is_whole=is_whole, depth=depth + 1)

        if is_whole:
            properties = schema.get("properties")
            declared = properties if isinstance(properties, Mapping) else {}
            part = declared.get(self._parameter, schema.get("additionalProperties"))
            if not allows(part, is_whole=False):
                return False
        elif not _fits(schema, value):
            return False

        parts = _parts_of(schema, "allOf")
        if isinstance(schema.get("$ref"), str):
            parts = [*parts, referred_schema(self._root, schema["$ref"])]

        choices = [options for key in ("anyOf", "oneOf") if (options := _parts_of(schema, key))]
        return all(map(allows, parts)) and all(any(map(allows, choice)) for choice in choices)


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the value fits the schema's own keys, without references and choices."""
    kind = _KINDS.get(type(value), "")
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list):
        may_be_null = schema.get("nullable") is True
        is_number = kind == "integer" and "number" in kinds
        if kind not in kinds and not is_number and not (may_be_null and kind == "null"):
            return False

    stated = schema.get("enum")
    if isinstance(stated, list) and not any(_are_equal(value, choice) for choice in stated):
        return False
    return "const" not in schema or _are_equal(value, schema["const"])


def _are_equal(first: Any, second: Any) -> bool:
    """Equality of JSON: true is not 1."""
    kinds = {_KINDS.get(type(first)), _KINDS.get(type(second))}
    return (len(kinds) == 1 or kinds == {"integer", "number"}) and bool(first == second)


def _parts_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


def referred_schema(schema: Any, reference: str) -> Any:
    """The schema at a reference within the whole schema, such as `#/$defs/Filter`. Empty if the
    reference has no target or leads out of the schema."""
    if not reference.startswith("#"):
        return {}

    for part in filter(None, unquote(reference[1:]).split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, Mapping) and name in schema:
            schema = schema[name]
        else:
            return {}

    return schema


def resolve_references(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema, or what its chain of references leads to within the whole schema `root`. Empty if
    that is no object."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = referred_schema(root, reference)

    return schema if isinstance(schema, Mapping) else {}


def _read(text: str) -> Any:
    """Parses a text as JSON. _NOTHING if it is not JSON, or is a string. Of an integer with
    thousands of digits only the type is used."""
    if _INTEGER.fullmatch(text):
        return int(text[:4_000])

    try:
        content = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING

    return _NOTHING if isinstance(content, str) else content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def json_text(value: object) -> str:
    """A value as JSON that any encoder accepts. Raises ValueError for values that JSON can't
    represent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value, allow_nan=False)
    return text
