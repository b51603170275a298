"""Exports spans as MLflow's traces: over OTLP to a server, or with MLflow's package to a database.

    http://HOST:5000         a server (3.4 or newer) accepts OTLP; MLflow's package is not needed
    sqlite:////tmp/mlruns.db and other databases, which `mlflow ui --backend-store-uri` opens

A server's credentials are MLflow's: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import httpx
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentevo.errors import AgentEvoError, MissingExtraError
from agentevo.observability.tracing.otlp import collector_exporter
from agentevo.runtime.credentials import without_password

EXPERIMENT_HEADER = "x-mlflow-experiment-id"
TIMEOUT_S = 30.0


class MLflowError(AgentEvoError):
    """A tracking server returned no experiment."""


def check_mlflow(uri: str) -> None:
    """Raises MissingExtraError for a database without MLflow's package."""
    if not uri.startswith(("http://", "https://")) and find_spec("mlflow") is None:
        raise MissingExtraError(
            "tracing.backend=mlflow without a server needs the package 'mlflow': pip install "
            "mlflow, or give tracing.endpoint=http://HOST:PORT of a server"
        )


class MLflowExporter(SpanExporter):
    """Exports spans to a tracking URI. The first export opens the exporter, because importing
    MLflow and creating its tables takes seconds. If that failed, the next export tries again."""

    def __init__(self, uri: str, experiment: str) -> None:
        is_server = uri.startswith(("http://", "https://"))
        self._open = _server_exporter if is_server else _DatabaseExporter
        self._uri = uri
        self._experiment = experiment
        self._exporter: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. Raises MLflow's errors."""
        if self._exporter is None:
            self._exporter = self._open(self._uri, self._experiment)
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """See SpanExporter."""
        if self._exporter is not None:
            self._exporter.shutdown()


def _server_exporter(uri: str, experiment: str) -> SpanExporter:
    """The exporter to a tracking server. It requests the experiment first."""
    uri = uri.rstrip("/")
    headers = _authorization()
    headers[EXPERIMENT_HEADER] = _experiment_id(uri, experiment, headers)
    return collector_exporter(uri, headers)


def _experiment_id(uri: str, experiment: str, headers: dict[str, str]) -> str:
    """The id of the experiment, which another process may create at the same time."""
    where = f"MLflow at {without_password(uri)}"

    def answer(method: str, what: str, **options: Any) -> dict[str, Any] | None:
        """The reply. None if there is no such experiment, or if it exists already."""
        url = f"{uri}/api/2.0/mlflow/experiments/{what}"
        reply = httpx.request(method, url, headers=headers, timeout=TIMEOUT_S, **options)
        if reply.status_code in (400, 404) and "RESOURCE_" in reply.text:
            return None
        if reply.status_code != 200:
            raise MLflowError(f"{where} answered {reply.status_code}: {reply.text[:200]}")

        content: dict[str, Any] = reply.json()
        return content

    name = {"experiment_name": experiment}
    experiment_reply = answer("GET", "get-by-name", params=name)
    if experiment_reply is None:
        created = answer("POST", "create", json={"name": experiment})
        if created is not None:
            return str(created["experiment_id"])
        experiment_reply = answer("GET", "get-by-name", params=name)

    if experiment_reply is None:
        raise MLflowError(f"{where} can't create the experiment {experiment!r}")
    return str(experiment_reply["experiment"]["experiment_id"])


def _authorization() -> dict[str, str]:
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


class _DatabaseExporter(SpanExporter):
    """Writes spans to a database with MLflow's package. The constructor imports the package, and
    creates the tables of a new database."""

    def __init__(self, uri: str, experiment: str) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.tracing.client import TracingClient

        client = MlflowClient(uri)
        existing = client.get_experiment_by_name(experiment)
        if existing is None:
            try:
                self._experiment_id = client.create_experiment(experiment)
            except MlflowException:  # another process has created it
                existing = client.get_experiment_by_name(experiment)
                if existing is None:
                    raise

        if existing is not None:
            self._experiment_id = existing.experiment_id

        self._client = TracingClient(uri)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        from mlflow.entities.span import Span

        (resource,) = encode_spans(spans).resource_spans
        (scope,) = resource.scope_spans
        self._client.log_spans(self._experiment_id, [Span.from_otel_proto(s) for s in scope.spans])
        return SpanExportResult.SUCCESS
