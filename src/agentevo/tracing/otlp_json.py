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
from agentevo.tracing.span import Source, Span, Value

_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
LONGEST_REMEMBERED = 200


def encoded(spans: Sequence[Span], source: Source) -> bytes:
    """An ExportTraceServiceRequest."""
    scope = {"name": names.SCOPE, "version": source.version}
    body = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(source.attributes)},
                "scopeSpans": [
                    {
                        "scope": scope,
                        "schemaUrl": names.SCHEMA_URL,
                        "spans": [_span(span) for span in spans],
                    }
                ],
            }
        ]
    }
    return msgspec.json.encode(body)


class JsonLines:
    """An exporter that adds to a file."""

    def __init__(self, path: Path, source: Source) -> None:
        """Raises OSError where no file can be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._source = source

    def open(self) -> None:
        """See Exporter."""

    def export(self, spans: Sequence[Span]) -> None:
        """See Exporter."""
        if spans:
            self._file.write(encoded(spans, self._source) + b"\n")

    def close(self) -> None:
        """See Exporter."""
        self._file.close()


def _span(span: Span) -> dict[str, Any]:
    told: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        told["parentSpanId"] = f"{span.parent_id:016x}"
    if span.events:
        told["events"] = [
            {
                "name": event.name,
                "timeUnixNano": str(event.at_ns),
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ]
    if span.links:
        told["links"] = [
            {"traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}"}
            for trace_id, span_id in span.links
        ]
    if span.is_error:
        told["status"] = {"code": _ERROR, "message": span.message}
    return told


def _attributes(attributes: Mapping[str, Value]) -> list[msgspec.Raw]:
    encoded = []
    for key, value in attributes.items():
        known: Any = tuple(value) if type(value) is list else value
        size = len(known) if type(known) is str else 0
        if type(known) is tuple:
            size = sum(map(len, known))
        encode = _remembered if size <= LONGEST_REMEMBERED else _encoded
        encoded.append(encode(key, known))
    return encoded


def _encoded(key: str, value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"key": key, "value": _value(value)}))


_remembered = lru_cache(8192, typed=True)(_encoded)
"""Most attributes of a span are those of many others: its run's, its attempt's, its model's."""


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
