"""Spans over OTLP/HTTP, by OpenTelemetry's own exporter: the one module that imports its packages.

The exporter follows the environment: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, _TIMEOUT, _COMPRESSION,
_CERTIFICATE and their forms for traces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.extras import load_extra
from agentevo.tracing import conventions as names
from agentevo.tracing.span import Source, Span, Value

PATH = "/v1/traces"
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")


class ExportError(AgentEvoError):
    """A collector has not taken spans in."""


class OTLP:
    """An exporter to a collector. `endpoint`: its base URL, else what the environment says;
    `headers` are sent beside those of the environment."""

    def __init__(
        self,
        source: Source,
        endpoint: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        needed_by: str = "tracing.backend=otlp",
    ) -> None:
        """Raises MissingExtraError without the packages."""
        module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        http = load_extra(module, "tracing", needed_by)
        self._resource, self._scope = _resource(source), _scope(source)
        url = None if endpoint is None else trace_url(endpoint)
        self._said = _Heard()
        self._where = url or os.environ.get(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"),
        )
        try:
            self._exporter = http.OTLPSpanExporter(endpoint=url, headers=headers)
        except Exception as error:  # whatever the environment's variables make of it
            raise ConfigError(f"{needed_by}: no exporter can be made: {error}") from error

    def open(self) -> None:
        """See Exporter."""
        import opentelemetry.exporter.otlp.proto.common.trace_encoder
        import opentelemetry.sdk.trace.export  # noqa: F401

    def made(self, span: Span) -> Span:
        """See Exporter."""
        return span

    def export(self, made: Sequence[Span]) -> None:
        """See Exporter."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if not made:
            return
        self._said.text = ""
        readable = _readable(made, self._resource, self._scope)
        if self._exporter.export(readable) is not SpanExportResult.SUCCESS:
            why = f": {self._said.text}" if self._said.text else ""
            raise ExportError(f"{self._where} has not taken {len(made)} spans in{why}")

    def close(self) -> None:
        """See Exporter."""
        self._exporter.shutdown()
        self._said.close()


class _Heard(logging.Handler):
    """What OpenTelemetry logs of a failure, which is told once instead of printed each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._before: list[tuple[logging.Logger, bool]] = []
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            self._before.append((logger, logger.propagate))
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        with suppress(Exception):
            self.text = record.getMessage()[:500]

    def close(self) -> None:
        """Logs as before."""
        for logger, propagates in self._before:
            logger.removeHandler(self)
            logger.propagate = propagates
        super().close()


def trace_url(endpoint: str) -> str:
    """Where a collector at a base URL takes spans in."""
    return endpoint if endpoint.rstrip("/").endswith(PATH) else endpoint.rstrip("/") + PATH


def proto_request(spans: Sequence[Span], source: Source) -> Any:
    """An ExportTraceServiceRequest of opentelemetry-proto."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    resource, scope = _resource(source), _scope(source)
    return encode_spans(_readable(spans, resource, scope))


def _resource(source: Source) -> Any:
    from opentelemetry.sdk.resources import Resource

    class Remembered(Resource):
        """OpenTelemetry's encoder asks for the hash with every span, which is JSON each time."""

        def __hash__(self) -> int:
            return known

    known = hash(Resource(dict(source.attributes)))
    return Remembered(dict(source.attributes))


def _scope(source: Source) -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope(names.SCOPE, source.version, names.SCHEMA_URL)


def _readable(spans: Sequence[Span], resource: Any, scope: Any) -> list[Any]:
    """The spans as OpenTelemetry's exporters take them."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    sampled, fine = TraceFlags(TraceFlags.SAMPLED), Status()
    kinds = {
        "internal": SpanKind.INTERNAL,
        "server": SpanKind.SERVER,
        "client": SpanKind.CLIENT,
    }
    return [
        ReadableSpan(
            span.name,
            context=SpanContext(span.trace_id, span.span_id, False, sampled),
            parent=None
            if span.parent_id is None
            else SpanContext(span.trace_id, span.parent_id, False, sampled),
            resource=resource,
            attributes=_plain(span.attributes),
            events=[Event(one.name, _plain(one.attributes), one.at_ns) for one in span.events],
            links=[Link(SpanContext(*one, True, sampled)) for one in span.links],
            kind=kinds[span.kind],
            instrumentation_scope=scope,
            status=Status(StatusCode.ERROR, span.message) if span.is_error else fine,
            start_time=span.start_ns,
            end_time=span.end_ns,
        )
        for span in spans
    ]


def _plain(attributes: Mapping[str, Value]) -> dict[str, Any]:
    return dict(attributes)


def trace_this_process(needed_by: str) -> Callable[[], None]:
    """From now on what this process's packages trace by OpenTelemetry's own API, such as the MCP
    SDK, is exported over OTLP as the environment says. Gives what ends that; raises
    MissingExtraError."""
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    http = load_extra(module, "tracing", needed_by)
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    heard = _Heard()
    provider = TracerProvider()  # its resource, sampler and limits are the environment's
    provider.add_span_processor(BatchSpanProcessor(http.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def end() -> None:
        provider.shutdown()
        heard.close()

    return end
