"""Processes without a recipe, such as `agentevo tools serve`. Only OpenTelemetry's variables decide
whether they are traced, and where the spans go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from agentevo.observability.tracing.first_warning import FirstWarning
from agentevo.observability.tracing.setup import load_sdk
from agentevo.runtime.console import to_stderr

ENABLING_VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Any of these variables turns tracing on."""


@contextmanager
def traced_as_environment() -> Iterator[None]:
    """A block whose spans are exported if the environment requests it: OTEL_TRACES_EXPORTER is
    `otlp`, or it is not set and there is an endpoint. Packages of this process that use
    OpenTelemetry's own API, such as the MCP SDK, then send their spans over OTLP. Raises
    MissingExtraError."""
    variable = next((name for name in ENABLING_VARIABLES if os.environ.get(name)), None)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if variable is None or is_off or exporter.strip().lower() != "otlp":
        yield
        return

    load_sdk(f"the environment variable {variable}")
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    with closing(FirstWarning(to_stderr).open()):
        provider = TracerProvider()  # its resource, sampler and limits come from the environment
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
        try:
            yield
        finally:
            provider.shutdown()
