"""A process without a recipe, which the environment asks to trace: what it can't send is told
once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from collector import Collector

PROGRAM = """
from opentelemetry import trace
from agentevo.observability.tracing.setup import traced_as_environment

with traced_as_environment():
    for name in ("first", "second"):
        with trace.get_tracer("test").start_as_current_span(name):
            pass
        trace.get_tracer_provider().force_flush()
"""


def said(url: str) -> str:
    """What the process writes to stderr."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=plain | asked,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_failure_is_told_once_and_a_success_not_at_all() -> None:
    with Collector(answer=lambda: 400) as collector:
        (line,) = said(collector.url).splitlines()
    assert "tracing: spans may be missing (reported once): " in line
    assert "400" in line
    with Collector() as collector:
        assert said(collector.url) == ""
        assert [span.name for span in collector.spans] == ["first", "second"]
