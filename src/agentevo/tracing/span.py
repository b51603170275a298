"""A span as this package makes it, before an exporter gives it a form of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import msgspec

Value = str | bool | int | float | list[str]
Kind = Literal["internal", "server", "client"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a span."""

    name: str
    at_ns: int
    attributes: dict[str, Value]


class Shared:
    """Attributes that many spans have; nobody changes them. An exporter remembers by the object
    what it has made of them."""

    __slots__ = ("attributes",)

    def __init__(self, attributes: dict[str, Value]) -> None:
        self.attributes = attributes


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """See the module. Ids are never 0."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    shared: tuple[Shared, ...] = ()
    own: dict[str, Value]
    """No name is in two of them, or in `shared` and here."""
    events: tuple[Event, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids of what it belongs to in other traces."""
    is_error: bool = False
    message: str = ""
    """Why it failed."""

    @property
    def attributes(self) -> dict[str, Value]:
        """All of them."""
        found: dict[str, Value] = {}
        for one in self.shared:
            found |= one.attributes
        return found | self.own


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where spans come from: what OpenTelemetry calls the resource and the scope."""

    attributes: dict[str, Any]
    version: str
    """Of this package."""


LONGEST_REMEMBERED = 200
"""Characters of a value."""


def remembering(encode: Callable[[str, Any], bytes]) -> Callable[[str, Value], bytes]:
    """What encodes an attribute, and remembers short ones: most attributes of a span are those of
    many others. `encode` gets a tuple in place of a list."""
    remembered = lru_cache(8192, typed=True)(encode)

    def attribute(key: str, value: Value) -> bytes:
        known: Any = tuple(value) if type(value) is list else value
        size = len(known) if type(known) is str else 0
        if type(known) is tuple:
            size = sum(map(len, known))
        return (remembered if size <= LONGEST_REMEMBERED else encode)(key, known)

    return attribute
