"""Spans of OpenTelemetry, made of the calls that attempts record."""

from agentevo.observability.tracing.setup import check_tracing, open_tracing

__all__ = ["check_tracing", "open_tracing"]
