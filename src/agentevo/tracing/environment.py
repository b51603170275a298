"""Processes without a recipe, such as `agentevo mcp serve`: OpenTelemetry's variables alone say
whether they are traced, and where the spans go."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentevo.console import to_stderr
from agentevo.credentials import without_passwords
from agentevo.extras import load_extra

ASKED_BY = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Any of these asks for spans."""
LONGEST_WORDS = 500
"""Characters of a failure that are told."""
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")


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

    end = _trace_this_process(f"the environment variable {asked}")
    try:
        yield
    finally:
        end()


def _trace_this_process(needed_by: str) -> Callable[[], None]:
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


class _Heard(logging.Handler):
    """What OpenTelemetry logs of a failure, which is told at the first time instead of each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_told = False
        self._before: list[tuple[logging.Logger, bool]] = []
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            self._before.append((logger, logger.propagate))
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if not self._is_told:
            self._is_told = True
            words = without_passwords(record.getMessage())[:LONGEST_WORDS]
            to_stderr(f"tracing: spans may be missing (told once): {words}")

    def close(self) -> None:
        """Logs as before."""
        for logger, propagates in self._before:
            logger.removeHandler(self)
            logger.propagate = propagates
        super().close()
