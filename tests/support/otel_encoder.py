"""What OpenTelemetry's own SDK and encoder make of our spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentevo.tracing import conventions as names
from agentevo.tracing.span import Source, Span

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


def request_of_sdk(spans: Sequence[Span], source: Source) -> Any:
    """An ExportTraceServiceRequest. A span without an error has no status, which means the same as
    the empty one that the encoder writes."""
    resource = Resource(dict(source.attributes))
    scope = InstrumentationScope(names.SCOPE, source.version, names.SCHEMA_URL)
    made = encode_spans([_readable(span, resource, scope) for span in spans])
    for one in made.resource_spans[0].scope_spans[0].spans:
        if not one.status.code:
            one.ClearField("status")
    return made


def _readable(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(span.trace_id, span.parent_id, False, _SAMPLED)

    return ReadableSpan(
        span.name,
        context=SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(one.name, dict(one.attributes), one.at_ns) for one in span.events],
        links=[Link(SpanContext(*one, True, _SAMPLED)) for one in span.links],
        kind=_KINDS[span.kind],
        instrumentation_scope=scope,
        status=Status(StatusCode.ERROR, span.message) if span.is_error else Status(),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )
