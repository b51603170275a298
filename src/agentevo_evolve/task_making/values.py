"""Values for the arguments of calls, all from the server. Its schemas have choices, defaults,
examples and bounds. Its descriptions list values ("single, double or family", "such as Rome"). Its
results name values (keys of JSON, "room 12", "city: Oslo or Rome" in a refusal).

A parameter without such a value gets a person's name, a word or a small number. No value is
trusted: only a call shows whether a tool accepts it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentevo.agents.tools.trial import made_value
from agentevo.models.tool_calls.parameters import referred_schema

PEOPLE = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo",
    "Mia", "Noa", "Otto", "Pia",
)  # fmt: skip
WORDS = (
    "apple", "bridge", "candle", "desk", "engine", "forest", "garden", "harbour", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil",
)  # fmt: skip
_PERSON = re.compile(
    r"name|guest|user|person|customer|client|author|owner|member|patient|passenger|recipient"
)
MAX_VALUES = 200
"""The maximum number of values of a parameter."""
MAX_VALUE_CHARS = 80
"""The maximum number of characters of a value."""
MADE_UP_PROBABILITY = 0.5
"""The probability that a text is made up, although calls have shown values. Only for parameters
whose schema names no values."""
MAX_MADE_UP_NUMBER = 9
"""The largest random whole number if the schema has no bound."""
_WORD = r"['\"]?[\w][\w./-]*['\"]?"
_CHOICE = re.compile(rf"({_WORD}(?:, {_WORD})*,? (?:or|and) {_WORD})(?=[\s.;)]|$)")
_EXAMPLE = re.compile(
    rf"(?:such as|for example|e\.g\.,?|for instance,?) ({_WORD}(?:, {_WORD})*(?:,? or {_WORD})?)",
    re.IGNORECASE,
)
_STOP = frozenset(["the", "a", "an", "it", "is", "of", "to", "in", "on", "be", "this", "that"])


class Values:
    """The known values of each parameter, by its name."""

    def __init__(self, named_values: Mapping[str, Sequence[Any]] | None = None) -> None:
        """`named_values`: maps a parameter to the values that the user names. They come before all
        others."""
        self._values_by_name: dict[str, list[Any]] = {}
        for name, values in (named_values or {}).items():
            self.add(name, values)

    def add(self, name: str, values: Sequence[Any]) -> None:
        """Adds values of a parameter."""
        values_so_far = self._values_by_name.setdefault(name.lower(), [])
        for value in values:
            if (
                value not in values_so_far
                and len(values_so_far) < MAX_VALUES
                and len(str(value)) <= MAX_VALUE_CHARS
            ):
                values_so_far.append(value)

    def learn(self, schema: Mapping[str, Any], *texts: str) -> None:
        """Adds the values that the texts of results name for a tool's parameters."""
        for name, property_schema in properties(schema).items():
            for text in texts:
                self.add(name, list(values_in_text(text, name, property_schema)))

    def known_values(self, name: str, schema: Mapping[str, Any]) -> list[Any]:
        """Values that the server has shown for a parameter."""
        stated = [
            stated_value
            for stated_value in stated_values(schema)
            if len(str(stated_value)) <= MAX_VALUE_CHARS
        ]
        stated += [
            value for value in self._values_by_name.get(name.lower(), []) if value not in stated
        ]
        return [value for value in stated if _fits(value, schema)]

    def draw(self, name: str, schema: Mapping[str, Any], draw: random.Random) -> Any:
        """A random known value, or a made-up value if none is known."""
        known_values = self.known_values(name, schema)
        kind = _kind(schema)
        is_free = kind == "string" and not stated_values(schema)
        if known_values and not (is_free and draw.random() < MADE_UP_PROBABILITY):
            return draw.choice(known_values)
        if kind in ("integer", "number"):
            return _number(schema, draw)
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "string" and not {"format", "pattern", "minLength", "maxLength"} & set(schema):
            return draw.choice(PEOPLE if _PERSON.search(name.lower()) else WORDS)

        return made_value(schema, schema)


def properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A tool's parameters, including those behind a reference."""
    schemas = {}
    for name, property_schema in (schema.get("properties") or {}).items():
        for _ in range(6):
            reference = (
                property_schema.get("$ref") if isinstance(property_schema, Mapping) else None
            )
            if not isinstance(reference, str):
                break
            property_schema = referred_schema(schema, reference)

        schemas[str(name)] = property_schema if isinstance(property_schema, Mapping) else {}

    return schemas


def stated_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a parameter's own schema names."""
    values: list[Any] = []
    if "const" in schema:
        return [schema["const"]]

    for key in ("enum", "examples"):
        listed = schema.get(key)
        values += listed if isinstance(listed, list) else []

    if "default" in schema and schema["default"] is not None:
        values.append(schema["default"])

    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else []:
            values += stated_values(choice) if isinstance(choice, Mapping) else []

    if not values and _kind(schema) == "string":
        values = described_values(str(schema.get("description", "")))

    return list(
        dict.fromkeys(value for value in values if isinstance(value, (str, int, float, bool)))
    )


def described_values(text: str) -> list[str]:
    """The values that a description lists: "single, double or family", "such as Rome or Oslo"."""
    example = _EXAMPLE.search(text)
    if example is not None:
        return _list_words(example[1])
    choice = _CHOICE.match(text.strip())
    return _list_words(choice[1]) if choice is not None else []


def values_in_text(text: str, name: str, schema: Mapping[str, Any]) -> Iterator[Any]:
    """The values of a parameter that a result names, in their order."""
    kind = _kind(schema)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None

    if isinstance(tree, (dict, list)):
        yield from _leaves(tree, name.lower(), kind)
        return

    word = re.escape(name.replace("_", " ")).replace(r"\ ", "[ _]")
    if kind in ("integer", "number"):
        for match in re.finditer(rf"\b{word}\b\W{{0,3}}(-?\d{{1,15}}(?:\.\d+)?)", text, re.I):
            yield int(match[1]) if "." not in match[1] else float(match[1])
        return

    if kind != "string":
        return

    for match in re.finditer(rf"\b{word}\b\s?[:=]\s?([^\n;]{{1,400}})", text, re.I):
        choice = _CHOICE.match(match[1])
        single = re.match(_WORD, match[1])
        if choice is not None:
            yield from _list_words(choice[1])
        elif single is not None:
            yield single[0].strip("'\"")

    if text.strip() and all(re.fullmatch(r"[\w./:@-]+", line) for line in text.split("\n")):
        yield from text.split("\n")  # a list of names, such as files


def _leaves(tree: Any, name: str, kind: str, depth: int = 0) -> Iterator[Any]:
    if depth > 8:
        return

    if isinstance(tree, list):
        for item in tree[:MAX_VALUES]:
            yield from _leaves(item, name, kind, depth + 1)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(value, (dict, list)):
                yield from _leaves(value, name, kind, depth + 1)
            elif _same(str(key).lower(), name) and _is_of(value, kind):
                yield value


def _same(key: str, name: str) -> bool:
    """Whether a key of a result means the parameter: room_id and room, or id and room_id."""
    return key == name or name.endswith(f"_{key}") or key.endswith(f"_{name}")


def _list_words(text: str) -> list[str]:
    words = [word.strip("'\" .") for word in re.split(r",? (?:or|and) |, ", text)]
    return [word for word in words if word and word.lower() not in _STOP]


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((kind_name for kind_name in kind if kind_name != "null"), None)

    for key in ("anyOf", "oneOf"):
        if kind is None and isinstance(schema.get(key), list):
            kinds = [_kind(branch) for branch in schema[key] if isinstance(branch, Mapping)]
            kind = next((kind_name for kind_name in kinds if kind_name != "null"), None)

    return str(kind or "string")


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind in ("integer", "number"):
        return isinstance(value, (int, float)) and (kind == "number" or value == int(value))
    return kind == "string" and isinstance(value, str) and bool(value.strip())


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    return _is_of(value, _kind(schema)) or "enum" in schema or "const" in schema


def _number(schema: Mapping[str, Any], draw: random.Random) -> int | float:
    def bound(key: str, step: int) -> float | None:
        value = schema.get(key)
        beyond = schema.get(f"exclusive{key.capitalize()}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_beyond = isinstance(beyond, (int, float)) and not isinstance(beyond, bool)
        return value if is_number else beyond + step if is_beyond else None  # type: ignore[operator]

    least = bound("minimum", 1)
    most = bound("maximum", -1)
    least = (
        least if least is not None else min(1, most - MAX_MADE_UP_NUMBER) if most is not None else 1
    )
    most = min(most, least + 10**6) if most is not None else least + MAX_MADE_UP_NUMBER - 1
    return draw.randint(int(least), max(int(least), int(most)))
