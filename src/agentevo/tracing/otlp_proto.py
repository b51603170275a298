"""Spans in OTLP's protobuf encoding
(https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto,
https://protobuf.dev/programming-guides/encoding/). It needs no package.

OpenTelemetry's SDK makes objects of every attribute of every span, which cost a training 160 us of
CPU a span, and more than 1% of its time; most attributes are those of many others, and are encoded
once here. Tests compare the two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentevo.tracing import conventions as names
from agentevo.tracing.span import Event, Shared, Source, Span, Value, remembering

_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
_IS_LOCAL = 0x100
"""Flag of a parent or link: it is known whether that is another process's."""
_IS_REMOTE = 0x300
"""Flags of a parent or link: it is known to be another process's."""
_MAX_UINT64 = 2**64 - 1
_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack


def request(spans: Sequence[bytes], source: Source) -> bytes:
    """An ExportTraceServiceRequest of spans that are encoded."""
    scope = _text(1, names.SCOPE) + _text(2, source.version)
    told = [_block(1, scope), *(_block(2, span) for span in spans), _text(3, names.SCHEMA_URL)]
    resource = _attributes(1, source.attributes)
    return _block(1, _block(1, resource) + _block(2, b"".join(told)))


def encoded_span(span: Span) -> bytes:
    """A message Span. Raises UnicodeEncodeError for text that UTF-8 can't hold."""
    parts = [
        b"\x0a\x10",  # fields 1 and 2, of 16 and 8 bytes
        span.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        span.span_id.to_bytes(8, "big"),
        _name(span.name),
        _KIND[span.kind],
        b"\x39",  # fields 7 and 8
        _fixed64(span.start_ns),
        b"\x41",
        _fixed64(span.end_ns),
        _FLAGS,
    ]
    if span.parent_id is not None:
        parts += (b"\x22\x08", span.parent_id.to_bytes(8, "big"))  # field 4

    parts += map(_of_shared, span.shared)
    parts += [_attribute(key, value) for key, value in span.own.items()]
    if not (span.events or span.links or span.is_error):
        return b"".join(parts)

    parts += [_block(11, _event(event)) for event in span.events]
    parts += [_block(13, _link(*link)) for link in span.links]
    if span.is_error:
        parts.append(_block(15, _text(2, span.message) + _number(3, _ERROR)))

    return b"".join(parts)


def _event(event: Event) -> bytes:
    at = _tag(1, 1) + _fixed64(event.at_ns)
    return at + _text(2, event.name) + _attributes(3, event.attributes)


def _link(trace_id: int, span_id: int) -> bytes:
    ids = _block(1, trace_id.to_bytes(16, "big")) + _block(2, span_id.to_bytes(8, "big"))
    return ids + _tag(6, 5) + _fixed32(_IS_REMOTE)


def _attributes(field: int, attributes: Mapping[str, Any]) -> bytes:
    return b"".join(_block(field, _pair(key, value)) for key, value in attributes.items())


def _pair(key: str, value: Any) -> bytes:
    """A message KeyValue."""
    return _text(1, key) + _block(2, _value(value))


def _value(value: Value | Iterable[str]) -> bytes:
    """A message AnyValue."""
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int):
        return _number(3, value & _MAX_UINT64)
    if isinstance(value, float):
        return _tag(4, 1) + _double(value)
    if isinstance(value, str):
        return _text(1, value)
    return _block(5, b"".join(_block(1, _value(one)) for one in value))


def _text(field: int, text: str) -> bytes:
    return _block(field, text.encode())


def _block(field: int, content: bytes) -> bytes:
    """A field that says how long it is: bytes, a text, a message."""
    size = len(content)
    head = _HEADS[field][size] if size < 0x80 else _tag(field, 2) + _varint(size)
    return head + content


def _number(field: int, number: int) -> bytes:
    return _tag(field, 0) + _varint(number)


@lru_cache(256)
def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have their highest bit set."""
    if number < 0x80:
        return _BYTES[number]

    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7

    digits.append(number)
    return bytes(digits)


@lru_cache(1024)
def _name(name: str) -> bytes:
    return _text(5, name)


@lru_cache(4096)
def _of_shared(shared: Shared) -> bytes:
    """The attributes of an attempt, or of all calls of a kind."""
    return b"".join(_attribute(key, value) for key, value in shared.attributes.items())


def _own_attribute(key: str, value: Any) -> bytes:
    return _block(9, _pair(key, value))


_BYTES = [bytes([number]) for number in range(0x80)]
_HEADS = [[_tag(field, 2) + size for size in _BYTES] for field in range(16)]
_attribute = remembering(_own_attribute)
_FLAGS = _tag(16, 5) + _fixed32(_IS_LOCAL)
_KIND = {name: _number(6, kind) for name, kind in _KINDS.items()}
