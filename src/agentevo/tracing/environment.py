"""Processes without a recipe, such as `agentevo mcp serve`: OpenTelemetry's variables alone say
whether they are traced, and where the spans go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ASKED_BY = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Any of these asks for spans."""


@contextmanager
def traced_as_environment() -> Iterator[None]:
    """A block whose spans are exported where the environment asks for that: OTEL_TRACES_EXPORTER is
    `otlp`, or there is an endpoint and it is not set. Raises MissingExtraError."""
    asked = next((name for name in ASKED_BY if os.environ.get(name)), None)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if asked is None or is_off or exporter.strip().lower() != "otlp":
        yield
        return
    from agentevo.tracing.otlp import trace_this_process

    end = trace_this_process(f"the environment variable {asked}")
    try:
        yield
    finally:
        end()
