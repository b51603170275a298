"""The notation of MiniMax M3: parameters are elements named by their keys, and every tag begins
with a separator. Objects and lists are elements within, the items of a list in <item>.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Texts, numbers, and empty lists and objects look alike, so the tool's schema decides. Without one,
elements that are all called `item` are a list. A model that does not think may begin with the end
of a thought.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentevo.models.tool_calls.json_notation import checked_name
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recovery, read_call, skip_mark
from agentevo.models.tool_calls.parameters import (
    MAX_DEPTH,
    MAX_SCHEMAS,
    json_of_value,
    json_text,
    referred_schema,
)
from agentevo.models.tool_calls.tags import name_attribute
from agentevo.models.tool_calls.text import CallText, Wait, marks

SEPARATOR = "]<]minimax[>["
THOUGHT_END = "</mm:think>"
_BEGIN = f"{SEPARATOR}<invoke"
_WRAPPER = f"{SEPARATOR}<tool_call>"
_WRAPPER_END = f"{SEPARATOR}</tool_call>"
_END = "</invoke>"
_ITEM = "item"
_RECOVERY = Recovery((f"{SEPARATOR}{_END}",), (_BEGIN, _WRAPPER_END))
MAX_LEVELS = 100
"""The deepest nesting of elements."""


@dataclass(frozen=True)
class Element:
    """The content of an element: a text, or elements."""

    text: str
    children: tuple[tuple[str, Element], ...] = ()


def read_elements(out: ParsedOutput) -> Wait:
    """Reads the text to its end."""
    text = out.text
    if (yield from text.starts_with(THOUGHT_END)):
        text.take_next(len(THOUGHT_END))
        out.cut()

    while mark := (yield from text.until(marks(_BEGIN, _WRAPPER), out.content)):
        lead = ""
        if mark == _WRAPPER:
            lead = text.take_next(len(mark)) + (yield from text.skip_space())
            if not (yield from text.starts_with(_BEGIN)):
                out.content(lead)
                continue

        yield from read_call(out, partial(_read_call, out), _RECOVERY, lead=lead)
        yield from skip_mark(out, _WRAPPER_END)


def _read_call(out: ParsedOutput, call: OpenCall) -> Wait:
    text = out.text
    yield from text.expect(_BEGIN)
    name, _ = yield from text.collect(">")
    call.set_name(checked_name(text, name_attribute(text, name)))
    text.take_next()

    whole = out.types.schema_of(call.name)
    while True:
        yield from text.expect(SEPARATOR)
        if (yield from text.starts_with(_END)):
            text.take_next(len(_END))
            return

        yield from text.expect("<", expected="a parameter")
        key = yield from _read_key(text)
        element = yield from _read_content(text, key, level=1)
        call.begin_argument(key)
        call.add_arguments(_json_of(text, whole, _inner(whole, whole, key), element))


def _read_key(text: CallText) -> Generator[None, None, str]:
    key, _ = yield from text.collect(">")
    text.take_next()
    return key


def _read_content(text: CallText, key: str, level: int) -> Generator[None, None, Element]:
    """The content of the element `key`, up to and including its end."""
    if level > MAX_LEVELS:
        raise text.broken(f"it is nested in more than {MAX_LEVELS} levels")

    end = f"</{key}>"
    pieces = []
    children: list[tuple[str, Element]] = []
    while True:
        piece, _ = yield from text.collect(SEPARATOR)
        text.take_next(len(SEPARATOR))
        pieces.append(piece)
        if (yield from text.starts_with(end)):
            text.take_next(len(end))
            break

        if not (yield from text.starts_with("<")) or (yield from text.starts_with("</")):
            raise text.broken(f"it needs {SEPARATOR}{end}")

        text.take_next()
        child = yield from _read_key(text)
        children.append((child, (yield from _read_content(text, child, level + 1))))

    content = "".join(pieces)
    if children and content.strip():
        raise text.broken(f"the parameter {key!r} has text beside its elements")
    return Element(content, tuple(children))


Schema = Mapping[str, Any]


def _json_of(text: CallText, whole: Schema, schema: Schema, element: Element) -> str:
    """The element as JSON by its `schema`, whose references lead into the tool's schema `whole`."""
    kinds = {kind for part in _parts(whole, schema) for kind in _kinds(part)}
    if not element.children:
        is_empty = not element.text.strip() and "string" not in kinds
        if is_empty and kinds & {"array", "object"}:
            return "[]" if "array" in kinds else "{}"
        return json_of_value(schema, element.text, whole)

    keys = [key for key, _ in element.children]
    if set(keys) == {_ITEM} and ("array" in kinds or "object" not in kinds):
        items = _inner(whole, schema, None)
        values = (_json_of(text, whole, items, child) for _, child in element.children)
        return f"[{', '.join(values)}]"

    if len(set(keys)) < len(keys):
        double = next(key for key in keys if keys.count(key) > 1)
        raise text.broken(f"it has the element {double!r} twice")

    fields = (
        f"{json_text(key)}: {_json_of(text, whole, _inner(whole, schema, key), child)}"
        for key, child in element.children
    )
    return "{" + ", ".join(fields) + "}"


def _inner(whole: Schema, schema: Schema, key: str | None) -> Schema:
    """The schema of a property, or with None of a list's items. Empty if it is unknown."""
    for part in _parts(whole, schema):
        inner = part.get("items")
        if key is not None:
            inner = _properties(part).get(key, part.get("additionalProperties"))
        if isinstance(inner, Mapping):
            return inner
    return {}


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _kinds(schema: Schema) -> set[str]:
    """The types that the schema itself names or shows by its keys."""
    stated = schema.get("type")
    stated = stated if isinstance(stated, list) else [stated]
    kinds = {kind for kind in stated if isinstance(kind, str)}
    if not kinds:
        kinds |= {"object"} if "properties" in schema else set()
        kinds |= {"array"} if "items" in schema else set()
    return kinds


def _parts(whole: Schema, schema: Schema) -> list[Schema]:
    """The schema, and those that it refers to or is composed of."""
    parts: list[Schema] = []
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting and len(parts) < MAX_SCHEMAS:
        part, depth = waiting.pop(0)
        if not isinstance(part, Mapping) or depth > MAX_DEPTH:
            continue

        parts.append(part)
        if isinstance(part.get("$ref"), str):
            waiting.append((referred_schema(whole, part["$ref"]), depth + 1))
        for choice in ("allOf", "anyOf", "oneOf"):
            options = part.get(choice)
            waiting += [(o, depth + 1) for o in options] if isinstance(options, list) else []

    return parts
