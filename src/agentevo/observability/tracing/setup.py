"""Opens the tracer that a recipe's section `tracing` and OpenTelemetry's environment variables
describe.

The OpenTelemetry SDK is an extra, so modules that import it are imported only when they are
needed."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentevo.errors import ConfigError, DiskError
from agentevo.observability.tracing import conventions as names
from agentevo.observability.tracing.first_warning import FirstWarning
from agentevo.observability.tracing.section import TracingSection
from agentevo.observability.tracing.texts import SpanTexts
from agentevo.runtime.console import to_stderr
from agentevo.runtime.credentials import with_environment
from agentevo.runtime.extras import load_extra
from agentevo.runtime.files import create_atomic

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from agentevo.observability.tracing.tracer import TraceLimits, Tracer

FOLDER = "tracing"
"""The subfolder of the run's folder for the run's trace id and for the files of
`tracing.backend=jsonl`."""
DEFAULT_MAX_LENGTH = 16384
DEFAULT_QUEUE = 4096
DEFAULT_BATCH = 512
FILE_DELAY_MS = 1000
"""The longest time in milliseconds until a span is written to a file. A write is cheap."""
REQUEST_DELAY_MS = 5000
"""The longest time in milliseconds until a span is sent in a request, which costs milliseconds. The
value is OpenTelemetry's default."""
ENABLING_VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Any of these variables turns tracing on."""
_UNSAFE = re.compile(r"[^\w.-]")
_TRUE_VALUES = ("true", "1", "yes", "on", "span_only", "span_and_event", "event_only")
"""Texts that switch an environment variable on, in all spellings that instrumentations use."""


class NamedSection(Protocol):
    @property
    def name(self) -> str: ...


class TracedRun(Protocol):
    """The parts of a run's configuration that its traces depend on."""

    @property
    def tracing(self) -> TracingSection: ...

    @property
    def run(self) -> NamedSection: ...

    @property
    def model(self) -> NamedSection: ...

    @property
    def run_dir(self) -> Path: ...


def open_tracing(
    config: TracedRun,
    *,
    process: str,
    notify: Callable[[str], None],
    is_remote: bool,
) -> AbstractAsyncContextManager[Tracer | None]:
    """A tracer for this process, for an `async with`. None if the run is not traced. `process`: the
    name of this process, for the name of its file. `is_remote`: whether the engine is another
    process.

    The run's folder must exist. Raises ConfigError, MissingExtraError and DiskError.
    """
    section = config.tracing
    if _is_off(section):
        return nullcontext(None)

    check_tracing(config)
    from agentevo.observability.tracing.spans import RunFacts, Spans, run_resource
    from agentevo.observability.tracing.tracer import Tracer

    run_id = run_id_of(config.run_dir)
    contents = includes_contents(section)
    run = RunFacts(config.run.name, run_id, config.model.name, is_remote)
    return Tracer(
        lambda: _exporter(config, process),
        Spans(run, SpanTexts(max_length_of(section)), run_resource(), contents=contents),
        run_id=run_id,
        share=section.share,
        contents=contents,
        token2text=section.token2text,
        limits=_limits(section),
        flush_s=section.flush_s,
        notify=notify,
    )


def check_tracing(config: TracedRun) -> None:
    """Raises MissingExtraError and ConfigError for a tracer that can't be created, before anything
    is created."""
    section = config.tracing
    max_length_of(section)
    if _is_off(section):
        return

    load_sdk(f"tracing.backend={section.backend}")
    _limits(section)
    if section.backend == "otlp":
        from agentevo.observability.tracing.otlp import check_collector

        check_collector(_endpoint(section))
    elif section.backend == "mlflow":
        from agentevo.observability.tracing.mlflow import check_mlflow

        check_mlflow(_mlflow_uri(config))


def _is_off(section: TracingSection) -> bool:
    return section.backend is None or _is_true(os.environ.get(names.ENV_DISABLED, ""))


def load_sdk(needed_by: str) -> None:
    """Imports the OpenTelemetry SDK and its exporter. Raises MissingExtraError."""
    load_extra("opentelemetry.exporter.otlp.proto.http.trace_exporter", "tracing", needed_by)


def run_id_of(run_dir: Path) -> str:
    """The random id of this run, stored in its folder. Every process of the run derives the same
    trace ids from it."""
    path = run_dir / FOLDER / "run_id"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_atomic(path, secrets.token_hex(16))
        return path.read_text().strip()
    except OSError as error:
        raise DiskError(f"tracing: {path} can't be written: {error}") from error


def includes_contents(section: TracingSection) -> bool:
    """Whether spans contain messages."""
    setting = section.contents
    return _is_true(os.environ.get(names.ENV_CONTENTS, "")) if setting is None else setting


def max_length_of(section: TracingSection) -> int:
    """The maximum number of characters of an attribute's text. Raises ConfigError."""
    if section.max_length is not None:
        return section.max_length
    return next(
        (n for name in names.ENV_LENGTHS if (n := _number_from_environment(name)) is not None),
        DEFAULT_MAX_LENGTH,
    )


def _exporter(config: TracedRun, process: str) -> SpanExporter:
    from agentevo.observability.tracing.mlflow import MLflowExporter
    from agentevo.observability.tracing.otlp import JsonLines, collector_exporter

    section = config.tracing
    if section.backend == "otlp":
        return collector_exporter(_endpoint(section))

    if section.backend == "mlflow":
        experiment = section.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        return MLflowExporter(_mlflow_uri(config), experiment or config.run.name)

    name = _UNSAFE.sub("_", process)[:80]
    path = config.run_dir / FOLDER / f"{name}-{secrets.token_hex(4)}.jsonl"
    try:
        return JsonLines(path)
    except OSError as error:
        raise DiskError(f"tracing: {path} can't be written: {error}") from error


def _endpoint(section: TracingSection) -> str | None:
    return None if section.endpoint is None else with_environment(section.endpoint).strip()


def _mlflow_uri(config: TracedRun) -> str:
    uri = _endpoint(config.tracing) or os.environ.get("MLFLOW_TRACKING_URI")
    return uri or f"sqlite:///{config.run_dir / FOLDER / 'mlruns.db'}"


def _limits(section: TracingSection) -> TraceLimits:
    from agentevo.observability.tracing.tracer import TraceLimits

    queue = section.max_queue or _number_from_environment(names.ENV_QUEUE) or DEFAULT_QUEUE
    batch = _number_from_environment(names.ENV_BATCH) or DEFAULT_BATCH
    delay_ms = FILE_DELAY_MS if section.backend == "jsonl" else REQUEST_DELAY_MS
    delay_ms = _number_from_environment(names.ENV_DELAY_MS) or delay_ms
    return TraceLimits(queue=queue, batch=batch, delay_s=delay_ms / 1000)


def _number_from_environment(name: str) -> int | None:
    """A number in an environment variable. Raises ConfigError for any other text."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ConfigError(f"the environment variable {name} is {text[:40]!r}: give a number")
    return int(text)


def _is_true(text: str) -> bool:
    return text.strip().lower() in _TRUE_VALUES


@contextmanager
def traced_as_environment() -> Iterator[None]:
    """For processes without a recipe, such as `agentevo tools serve`: a block whose spans are
    exported if the environment requests it. OTEL_TRACES_EXPORTER is `otlp`, or it is not set and
    there is an endpoint. Packages of this process that use OpenTelemetry's own API, such as the MCP
    SDK, then send their spans over OTLP. Raises MissingExtraError."""
    variable = next((name for name in ENABLING_VARIABLES if os.environ.get(name)), None)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_off = os.environ.get(names.ENV_DISABLED, "").strip().lower() == "true"
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
