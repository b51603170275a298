"""Spans of OpenTelemetry, made of the calls that attempts record."""

from agentevo.tracing.opening import check_tracing, open_tracing
from agentevo.tracing.tracer import Tracer

__all__ = ["Tracer", "check_tracing", "open_tracing"]
