"""Values for the arguments of calls, all from the server. Its schemas have choices, defaults,
examples and bounds. Its descriptions list values ("single, double or family", "such as Rome"). Its
results name values (keys of JSON, "room 12", "city: Oslo or Rome" in a refusal).

A parameter without such a value gets a person's name, a word, a time or a small number. Objects and
lists are made of values of their parts. No value is trusted: only a call shows whether a tool
accepts it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentevo.agents.tools.trial import made_value
from agentevo.models.tool_calls.parameters import resolve_references

PEOPLE = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo",
    "Mia", "Noa", "Otto", "Pia",
)  # fmt: skip
WORDS = (
    "apple", "bridge", "candle", "desk", "engine", "forest", "garden", "harbour", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil",
)  # fmt: skip
TIME_ZONES = (
    "Europe/London", "Asia/Tokyo", "America/New_York", "Asia/Kolkata", "Australia/Sydney",
    "America/Los_Angeles", "Africa/Cairo", "Europe/Berlin", "America/Sao_Paulo", "Asia/Dubai",
)  # fmt: skip
_TIME = re.compile(r"\bHH:MM\b")
_TIME_ZONE = re.compile(r"time_?zone|tz$")
_PATH = re.compile(r"(?:^|_)(?:path|dir|directory|folder|file|filename|repo|repository)$")
_PATH_IN_TEXT = re.compile(r"(?<![\w:/.])(?:/[\w.@-]+)+")
_LISTED_FILE = re.compile(r"^\[(?:FILE|DIR)\]\s+([\w.-]+)", re.MULTILINE)
_SEARCH = re.compile(r"query|search|keyword|term|pattern|topic")
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
MAX_DEPTH = 6
MAX_ITEMS = 2
"""The largest random number of items of a list."""
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
        values_so_far = self._values_by_name.setdefault(normalize_name(name), [])
        for value in values:
            if (
                value not in values_so_far
                and len(values_so_far) < MAX_VALUES
                and len(str(value)) <= MAX_VALUE_CHARS
            ):
                values_so_far.append(value)

    def learn(self, schema: Mapping[str, Any], *texts: str) -> None:
        """Adds the values that the texts of results name for a tool's parameters, also for those
        within objects and lists."""
        for name, property_schema in all_parameters(schema):
            for text in texts:
                self.add(name, list(values_in_text(text, name, property_schema)))
                if is_path(name):
                    self.add("path", _PATH_IN_TEXT.findall(text))

    def learn_listed_files(self, folder: str, text: str) -> None:
        """Adds the paths of the files that a listing of a folder names."""
        base = folder.rstrip("/")
        self.add("path", [f"{base}/{name}" for name in _LISTED_FILE.findall(text)])

    def known_values(self, name: str, schema: Mapping[str, Any]) -> list[Any]:
        """Values that the server has shown for a parameter."""
        stated = [
            stated_value
            for stated_value in stated_values(schema)
            if len(str(stated_value)) <= MAX_VALUE_CHARS
        ]
        shown = self._values_by_name.get(normalize_name(name), [])
        shown = [*shown, *(self._values_by_name.get("path", []) if is_path(name) else [])]
        stated += [value for value in shown if value not in stated]
        return list(dict.fromkeys(value for value in stated if _fits(value, schema)))

    def draw(
        self,
        name: str,
        schema: Mapping[str, Any],
        draw: random.Random,
        root: Mapping[str, Any] | None = None,
        depth: int = 0,
    ) -> Any:
        """A random known value, or a made-up value if none is known. `root`: the schema that
        references point into."""
        root = schema if root is None else root
        kind = _kind(schema)
        if depth < MAX_DEPTH and kind == "object" and schema.get("properties"):
            return {
                part: self.draw(part, part_schema, draw, root, depth + 1)
                for part, part_schema in properties(schema, root).items()
                if part in (schema.get("required") or ())
            }
        if depth < MAX_DEPTH and kind == "array" and isinstance(schema.get("items"), Mapping):
            return self._draw_list(name, schema, draw, root, depth)

        known_values = self.known_values(name, schema)
        is_choice = "enum" in schema or "const" in schema
        is_counted = kind in ("integer", "number") and _has_own_number(schema)
        is_open = (kind == "string" and not stated_values(schema)) or is_counted
        is_open = is_open and not is_choice and not is_path(name)
        if known_values and not (is_open and draw.random() < MADE_UP_PROBABILITY):
            return draw.choice(known_values)

        if kind in ("integer", "number"):
            return _number(schema, draw)
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "string" and not {"format", "pattern", "minLength", "maxLength"} & set(schema):
            return self._make_up_text(name, schema, draw)

        return made_value(schema, root)

    def _draw_list(
        self,
        name: str,
        schema: Mapping[str, Any],
        draw: random.Random,
        root: Mapping[str, Any],
        depth: int,
    ) -> list[Any]:
        least = max(1, schema.get("minItems") or 1)
        most = max(least, min(MAX_ITEMS, schema.get("maxItems") or MAX_ITEMS))
        item_schema = resolve_references(schema["items"], root)
        items: list[Any] = []
        for _ in range(draw.randint(least, most)):
            item = self.draw(singular_name(name), item_schema, draw, root, depth + 1)
            items += [item] if item not in items or len(items) < least else []
        return items

    def _make_up_text(self, name: str, schema: Mapping[str, Any], draw: random.Random) -> str:
        key = normalize_name(name)
        description = str(schema.get("description", ""))
        if _TIME.search(description):
            return f"{draw.randrange(24):02}:{5 * draw.randrange(12):02}"
        if _TIME_ZONE.search(key):
            return draw.choice(TIME_ZONES)

        texts = [value for values in self._values_by_name.values() for value in values]
        texts = [value for value in texts if is_text(value) and "/" not in value]
        if _SEARCH.search(key) and texts and draw.random() < MADE_UP_PROBABILITY:
            return draw.choice(texts)
        return draw.choice(PEOPLE if _PERSON.search(key) else WORDS)


def normalize_name(name: str) -> str:
    """A parameter's name in one form: entityName, entity-name and entity_name are equal."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def singular_name(name: str) -> str:
    """The name of an item of a list: entityNames -> entityName, entities -> entity."""
    if name.endswith("ies"):
        return f"{name[:-3]}y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


def is_path(name: str) -> bool:
    """Whether a parameter is a path, by its name."""
    return bool(_PATH.search(normalize_name(name)))


def is_text(value: Any) -> bool:
    """Whether the value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def all_parameters(
    schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A tool's parameters with plain values, also those within objects and lists."""
    root = schema if root is None else root
    for name, property_schema in properties(schema, root).items():
        part_name = name
        part = property_schema
        if _kind(part) == "array" and isinstance(part.get("items"), Mapping):
            part_name = singular_name(name)
            part = resolve_references(part["items"], root)

        if part.get("properties") and depth < MAX_DEPTH:
            yield from all_parameters(part, root, depth + 1)
        else:
            yield part_name, part


def properties(
    schema: Mapping[str, Any], root: Mapping[str, Any] | None = None
) -> dict[str, Mapping[str, Any]]:
    """The parameters of a tool or of an object, including those behind a reference. `root`: the
    schema that references point into; by default `schema`."""
    items = (schema.get("properties") or {}).items()
    return {
        str(name): resolve_references(part, schema if root is None else root)
        for name, part in items
    }


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
        yield from _leaves(tree, normalize_name(name), kind)
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
            elif _same(normalize_name(str(key)), name) and _is_of(value, kind):
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


def _has_own_number(schema: Mapping[str, Any]) -> bool:
    """Whether a number is free within its schema: it has a default or a bound. Numbers without
    them are mostly ids, whose values come from results."""
    keys = ("default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return any(key in schema for key in keys)


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
