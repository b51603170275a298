"""The section `tracing`: spans of what attempts do, for OpenTelemetry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentevo.config.section import Section

Backend = Literal["otlp", "jsonl", "mlflow"]


class TracingSection(Section):
    """Where the calls of attempts go as spans of OpenTelemetry, beside the store
    (docs/observability.md). What is not set here follows OpenTelemetry's own environment
    variables."""

    backend: Backend | None = None
    """`otlp`: a collector, such as Jaeger, Langfuse or Phoenix, by OTLP over HTTP. `jsonl`: files
    in tracing/ of the run's folder. `mlflow`: MLflow's traces, on a server or in an SQLite file.
    Each needs the extra `tracing`. Off while it is not set."""
    endpoint: str | None = None
    """Of `otlp` the collector's base URL; default: OTEL_EXPORTER_OTLP_ENDPOINT, else
    http://localhost:4318. Of `mlflow` the tracking URI, such as http://127.0.0.1:5000 or
    sqlite:////tmp/mlruns.db; default: MLFLOW_TRACKING_URI, else tracing/mlruns.db in the run's
    folder. Keys belong into the environment (OTEL_EXPORTER_OTLP_HEADERS, MLFLOW_TRACKING_TOKEN)."""
    experiment: str | None = None
    """MLflow's experiment, made where it is missing. Default: MLFLOW_EXPERIMENT_NAME, else the
    run's name."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the attempts that are traced, decided by the attempt's id as OpenTelemetry's sampler
    traceidratio does: the same ones in every process of the run."""
    contents: bool | None = None
    """Whether spans hold what was said: messages, arguments and results of tools, output of
    programs. Default: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, else no."""
    token2text: bool = False
    """Whether spans of the policy's calls hold the texts of its exact tokens, special ones
    included."""
    max_length: int | None = Field(default=None, ge=16, le=2**24)
    """Longest text of an attribute, in characters; the middle of a longer one is left out. Default:
    OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT or OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT, else 16384."""
    max_queue: int | None = Field(default=None, ge=1, le=10**6)
    """Most spans that wait to be exported; of more the oldest are dropped. Default:
    OTEL_BSP_MAX_QUEUE_SIZE, else 4096."""
    flush_s: float = Field(default=30.0, ge=0, le=86400)
    """Longest wait at the end of a run for spans that are still to be exported, in seconds. An
    exporter that fails twice then is not waited for."""
