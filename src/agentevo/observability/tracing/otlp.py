"""Exports spans to a collector, with the OpenTelemetry SDK's exporter over HTTP, and to files. Each
line of a file is a request in OTLP's JSON
(https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/).

The SDK reads all settings that the recipe lacks from OTEL_EXPORTER_OTLP_*. A file only grows. If
the process is killed, the last line may be incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.util.types import Attributes

from agentevo.errors import ConfigError

PATH = "/v1/traces"
MAX_ANSWER_BYTES = 65536
"""The maximum number of bytes of a collector's answer that are read."""


def collector_exporter(
    endpoint: str | None, headers: Mapping[str, str] | None = None
) -> OTLPSpanExporter:
    """Sends spans to a collector. `endpoint` is the collector's base URL or the whole URL; None:
    the environment variables name the collector. Raises ConfigError, see `check_collector`."""
    check_collector(endpoint)
    if endpoint is not None and not endpoint.rstrip("/").endswith(PATH):
        endpoint = endpoint.rstrip("/") + PATH
    return OTLPSpanExporter(endpoint, headers=dict(headers or {}), session=_bounded_session())


def check_collector(endpoint: str | None) -> None:
    """Raises ConfigError for an endpoint that is not an HTTP URL, and for variables that this
    exporter does not support. No error contains the value of a header."""
    if endpoint is None and _variable("PROTOCOL").lower() == "grpc":
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but AgentEvo sends spans over HTTP: set "
            "tracing.endpoint to the collector's HTTP address, such as http://HOST:4318, which "
            "overrides the variable"
        )

    headers = unquote(_variable("HEADERS"))
    if not (headers.isprintable() and headers.isascii()):
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_HEADERS has a character that no header can have, such as the end "
            "of a line: give KEY=VALUE,KEY=VALUE in printable ASCII"
        )

    if endpoint is not None and not _is_http(endpoint):
        raise ConfigError(
            "tracing.endpoint is not a valid URL of a collector: give one such as http://HOST:4318 "
            "(in a password, `/`, `?`, `#` and `@` are written as %2F, %3F, %23 and %40)"
        )


def _variable(name: str) -> str:
    """The variable's value for traces, else its value for all signals, else an empty text."""
    general = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
    return (os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or general or "").strip()


def _is_http(endpoint: str) -> bool:
    try:
        url = httpx.URL(endpoint)
    except (httpx.InvalidURL, ValueError):
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _bounded_session() -> requests.Session:
    """A session that reads at most MAX_ANSWER_BYTES bytes of an answer."""

    def read_head(answer: requests.Response, *_: Any, **__: Any) -> None:
        answer.raw.read(MAX_ANSWER_BYTES)
        answer.close()  # the session reuses the connection only if the whole answer was read

    session = requests.Session()
    session.stream = True
    session.hooks["response"].append(read_head)
    return session


class JsonLines(SpanExporter):
    """Appends spans to a file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. Raises OSError."""
        self._file.write(request_json(spans) + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._file.close()


def request_json(spans: Sequence[ReadableSpan]) -> bytes:
    """An ExportTraceServiceRequest of spans that have the same resource and scope.

    This function replaces the SDK's encoder. protobuf's JSON of the same message takes nine times
    as long, and has ids in base64, although OTLP requires hexadecimal.
    """
    resource = spans[0].resource
    scope = spans[0].instrumentation_scope
    assert scope is not None
    scope_spans = {
        "scope": {"name": scope.name, "version": scope.version},
        "schemaUrl": scope.schema_url,
        # The spans are encoded separately, because Python's garbage collector would otherwise run
        # over very many containers.
        "spans": [msgspec.Raw(msgspec.json.encode(_span_json(span))) for span in spans],
    }
    resource_spans = {
        "resource": {"attributes": _attributes(resource.attributes)},
        "scopeSpans": [scope_spans],
    }
    return msgspec.json.encode({"resourceSpans": [resource_spans]})


def _span_json(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    content: dict[str, Any] = {
        "traceId": format_trace_id(span.context.trace_id),
        "spanId": format_span_id(span.context.span_id),
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
    }
    if span.parent is not None:
        content["parentSpanId"] = format_span_id(span.parent.span_id)
    if span.events:
        content["events"] = [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ]
    if span.links:
        content["links"] = [
            {
                "traceId": format_trace_id(link.context.trace_id),
                "spanId": format_span_id(link.context.span_id),
            }
            for link in span.links
        ]
    if not span.status.is_unset:
        code = span.status.status_code.value
        content["status"] = {"code": code, "message": span.status.description or ""}
    return content


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> dict[str, Any]:
    """The value as OTLP's AnyValue, whose integers are texts."""
    match value:
        case str():
            return {"stringValue": value}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"arrayValue": {"values": [_value(item) for item in value]}}
