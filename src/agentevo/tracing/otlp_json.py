"""Spans as OTLP's JSON, and a file of them: a line is one request, as OpenTelemetry's file exporter
writes it (https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/). It needs no package.

A file is added to and never changed; the last line of a process that was killed may be half one,
which readers of such files leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from agentevo.tracing import conventions as names
from agentevo.tracing.span import Shared, Source, Span, Value, remembering

_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2


def encoded(spans: Sequence[Span], source: Source, *, end: bytes = b"") -> bytes:
    """An ExportTraceServiceRequest, and what is to follow it."""
    return request([encoded_span(span) for span in spans], source, end=end)


def request(spans: Sequence[bytes], source: Source, *, end: bytes = b"") -> bytes:
    """The same of spans that are encoded."""
    scope = {"name": names.SCOPE, "version": source.version}
    parts = [b'{"resourceSpans":[{"resource":{"attributes":[']
    _add_attributes(parts, source.attributes, b"")
    parts += [b']},"scopeSpans":[{"scope":', _json(scope), b',"schemaUrl":']
    parts += [_json(names.SCHEMA_URL), b',"spans":[']
    parts += [b",".join(spans), b"]}]}]}", end]
    return b"".join(parts)


class JsonLines:
    """An exporter that adds to a file."""

    def __init__(self, path: Path, source: Source) -> None:
        """Raises OSError where no file can be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._source = source

    def open(self) -> None:
        """See Exporter."""

    def made(self, span: Span) -> bytes:
        """See Exporter."""
        return encoded_span(span)

    def export(self, made: Sequence[bytes]) -> None:
        """See Exporter."""
        if made:
            self._file.write(request(made, self._source, end=b"\n"))

    def close(self) -> None:
        """See Exporter."""
        self._file.close()


def encoded_span(span: Span) -> bytes:
    """One span of a request."""
    parent = "" if span.parent_id is None else f'"parentSpanId":"{span.parent_id:016x}",'
    head = (
        f'{{"traceId":"{span.trace_id:032x}","spanId":"{span.span_id:016x}",{parent}'
        f'"kind":{_KINDS[span.kind]},"startTimeUnixNano":"{span.start_ns}",'
        f'"endTimeUnixNano":"{span.end_ns}","name":'
    )
    parts = [head.encode(), _name(span.name), b',"attributes":[']
    before = b""
    for shared in span.shared:
        if shared.attributes:
            parts += (before, _of_shared(shared))
            before = b","

    _add_attributes(parts, span.own, before)
    parts.append(b"]")
    if span.events:
        parts.append(b',"events":[')
        for number, event in enumerate(span.events):
            head = f'{{"timeUnixNano":"{event.at_ns}","name":'
            parts += (b"," if number else b"", head.encode(), _name(event.name), b',"attributes":[')
            _add_attributes(parts, event.attributes, b"")
            parts.append(b"]}")
        parts.append(b"]")

    if span.links:
        links = [
            {"traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}"}
            for trace_id, span_id in span.links
        ]
        parts += (b',"links":', _json(links))

    if span.is_error:
        parts += (b',"status":', _json({"code": _ERROR, "message": span.message}))

    parts.append(b"}")
    return b"".join(parts)


def _add_attributes(parts: list[bytes], attributes: Mapping[str, Value], before: bytes) -> None:
    for key, value in attributes.items():
        parts += (before, _attribute(key, value))
        before = b","


def _encoded(key: str, value: Any) -> bytes:
    return _json({"key": key, "value": _value(value)})


_json = msgspec.json.Encoder().encode
_name = lru_cache(1024)(_json)
_attribute = remembering(_encoded)


@lru_cache(4096)
def _of_shared(shared: Shared) -> bytes:
    """The attributes of an attempt, or of all calls of a kind."""
    parts: list[bytes] = []
    _add_attributes(parts, shared.attributes, b"")
    return b"".join(parts)


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value(one) for one in value]}}
