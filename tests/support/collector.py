"""A collector of OpenTelemetry on loopback: parses what OTLP/HTTP brings, as protobuf or as JSON,
and keeps the spans."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_S = 300.0


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    kind: int
    error: str | None
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]
    """Trace ids."""
    start_ns: int
    end_ns: int


@dataclass
class Collector:
    """`with Collector() as collector`; programs send to `collector.url`. `answer` decides on the
    status of a request, and may take its time."""

    answer: Callable[[], int] = lambda: 200
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def until(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """The spans, once they are enough."""
        ends = time.monotonic() + WAIT_S
        while not enough(self.spans) and time.monotonic() < ends:
            time.sleep(0.02)
        assert enough(self.spans), [span.name for span in self.spans]
        return self.spans

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                elif self.headers.get("content-encoding") == "deflate":
                    body = zlib.decompress(body)

                status = collector.answer()
                if status == 200 and self.path == "/v1/traces":
                    is_json = self.headers["content-type"].startswith("application/json")
                    collector.spans += received(request_of_json(body) if is_json else body)
                    collector.headers.append({k.lower(): v for k, v in self.headers.items()})
                else:
                    status = status if status != 200 else 404

                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None: ...

        return Handler


def request_of_json(body: bytes) -> ExportTraceServiceRequest:
    """OTLP's JSON has ids in hexadecimal, and protobuf's own in base64."""
    told = json.loads(body)
    for resource in told["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for record in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in record:
                            record[name] = base64.b64encode(bytes.fromhex(record[name])).decode()

    return ParseDict(told, ExportTraceServiceRequest())


def received(request: ExportTraceServiceRequest | bytes) -> list[Received]:
    """The spans of a request."""
    if isinstance(request, bytes):
        request = ExportTraceServiceRequest.FromString(request)

    return [
        Received(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes=_plain(span.attributes),
            resource=_plain(resource.resource.attributes),
            kind=span.kind,
            error=span.status.message if span.status.code == 2 else None,
            events=[(event.name, _plain(event.attributes)) for event in span.events],
            links=[link.trace_id.hex() for link in span.links],
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
