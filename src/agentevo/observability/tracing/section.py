"""The section `tracing`: spans of what attempts do, for OpenTelemetry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentevo.runtime.section import Section

Backend = Literal["otlp", "jsonl", "mlflow"]


class TracingSection(Section):
    """Exports the calls of attempts as OpenTelemetry spans, in addition to the store
    (docs/observability.md). Keys that are not set here follow OpenTelemetry's environment
    variables."""

    backend: Backend | None = None
    """`otlp`: a collector, such as Jaeger, Langfuse or Phoenix, by OTLP over HTTP. `jsonl`: files
    in tracing/ of the run's folder. `mlflow`: MLflow's traces, on a server or in an SQLite file.
    Each needs the extra `tracing`. Tracing is off if this is not set."""
    endpoint: str | None = None
    """For `otlp`, the collector's base URL; default: OTEL_EXPORTER_OTLP_ENDPOINT, else
    http://localhost:4318. For `mlflow`, the tracking URI, such as http://127.0.0.1:5000 or
    sqlite:////tmp/mlruns.db; default: MLFLOW_TRACKING_URI, else tracing/mlruns.db in the run's
    folder. Set API keys in the environment (OTEL_EXPORTER_OTLP_HEADERS, MLFLOW_TRACKING_TOKEN)."""
    experiment: str | None = None
    """MLflow's experiment, created if it does not exist. Default: MLFLOW_EXPERIMENT_NAME, else the
    run's name."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the attempts that are traced. It is decided by the attempt's id, as in
    OpenTelemetry's sampler traceidratio, so every process of the run traces the same attempts."""
    contents: bool | None = None
    """Whether spans contain messages, arguments and results of tools, and output of programs.
    Default: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, else false."""
    token2text: bool = False
    """Whether spans of the policy's calls contain the text of its exact tokens, including special
    tokens."""
    max_length: int | None = Field(default=None, ge=16, le=2**24)
    """Maximum length of an attribute's text, in characters. A longer text is cut in the middle.
    Default: OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT or OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT, else
    16384."""
    max_queue: int | None = Field(default=None, ge=1, le=10**6)
    """Maximum number of spans that wait for export. Beyond it, the oldest are dropped. Default:
    OTEL_BSP_MAX_QUEUE_SIZE, else 4096."""
    flush_s: float = Field(default=30.0, ge=0, le=86400)
    """Maximum wait for the export of the remaining spans at the end of a run, in seconds. The wait
    ends if the exporter fails twice."""
