"""Spans as MLflow's traces: over OTLP to a server, or by MLflow's own package into a database.

    http://HOST:5000         a server (3.4 or newer) takes OTLP in; MLflow's package is not needed
    sqlite:////tmp/mlruns.db and other databases: what `mlflow ui --backend-store-uri` opens

A server's credentials are MLflow's: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from agentevo.credentials import without_password
from agentevo.errors import MissingExtraError
from agentevo.tracing.otlp import OTLP, ExportError
from agentevo.tracing.otlp_proto import encoded_span
from agentevo.tracing.span import Source, Span

EXPERIMENT_HEADER = "x-mlflow-experiment-id"
TIMEOUT_S = 30.0
NEEDED_BY = "tracing.backend=mlflow"


def mlflow_exporter(uri: str, experiment: str, source: Source) -> MLflowServer | MLflowDatabase:
    """What exports to a tracking URI. Raises MissingExtraError; a server or database is first asked
    by the first export."""
    if uri.startswith(("http://", "https://")):
        return MLflowServer(uri, experiment, source)
    return MLflowDatabase(uri, experiment)


class MLflowServer:
    """An exporter to a tracking server."""

    def __init__(self, uri: str, experiment: str, source: Source) -> None:
        self._uri = uri.rstrip("/")
        self._experiment = experiment
        self._source = source
        self._otlp: OTLP | None = None

    def open(self) -> None:
        """See Exporter."""
        if self._otlp is None:
            headers = _authorization()
            headers[EXPERIMENT_HEADER] = self._experiment_id(headers)
            self._otlp = OTLP(self._source, self._uri, headers=headers)

    def made(self, span: Span) -> bytes:
        """See Exporter."""
        return encoded_span(span)

    def export(self, made: Sequence[bytes]) -> None:
        """See Exporter."""
        self.open()
        assert self._otlp is not None
        self._otlp.export(made)

    def close(self) -> None:
        """See Exporter."""
        if self._otlp is not None:
            self._otlp.close()

    def _experiment_id(self, headers: dict[str, str]) -> str:
        """That of the experiment, which another process may make at this moment."""
        known = self._ask(
            "GET", "get-by-name", headers, params={"experiment_name": self._experiment}
        )
        if known is None:
            made = self._ask("POST", "create", headers, json={"name": self._experiment})
            if made is not None:
                return str(made["experiment_id"])
            known = self._ask(
                "GET", "get-by-name", headers, params={"experiment_name": self._experiment}
            )

        if known is None:
            raise ExportError(f"{self._where} makes no experiment {self._experiment!r}")

        return str(known["experiment"]["experiment_id"])

    @property
    def _where(self) -> str:
        return f"MLflow at {without_password(self._uri)}"

    def _ask(
        self, method: str, what: str, headers: dict[str, str], **options: Any
    ) -> dict[str, Any] | None:
        """MLflow's answer; None where there is no such experiment, or it is there already."""
        import httpx

        url = f"{self._uri}/api/2.0/mlflow/experiments/{what}"
        answer = httpx.request(method, url, headers=headers, timeout=TIMEOUT_S, **options)
        if answer.status_code in (400, 404) and "RESOURCE_" in answer.text:
            return None
        if answer.status_code != 200:
            raise ExportError(f"{self._where} answered {answer.status_code}: {answer.text[:200]}")

        told: dict[str, Any] = answer.json()
        return told


class MLflowDatabase:
    """An exporter into a database, which needs MLflow's package."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Raises MissingExtraError."""
        where = f"{NEEDED_BY} without a server"
        if find_spec("mlflow") is None:
            raise MissingExtraError(
                f"{where} needs the package 'mlflow': pip install mlflow, or give "
                "tracing.endpoint=http://HOST:PORT of a server"
            )

        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._experiment_id = ""

    def made(self, span: Span) -> bytes:
        """See Exporter."""
        return encoded_span(span)

    def export(self, made: Sequence[bytes]) -> None:
        """See Exporter."""
        self.open()
        from mlflow.entities.span import Span as MLflowSpan
        from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

        told = [MLflowSpan.from_otel_proto(ProtoSpan.FromString(span)) for span in made]
        self._client.log_spans(self._experiment_id, told)

    def close(self) -> None:
        """See Exporter."""

    def open(self) -> None:
        """See Exporter. Seconds: MLflow is imported, and a new database gets its tables."""
        if self._client is not None:
            return

        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.tracing.client import TracingClient

        client = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        if known is None:
            try:
                self._experiment_id = client.create_experiment(self._experiment)
            except MlflowException:  # another process has made it
                known = client.get_experiment_by_name(self._experiment)
                if known is None:
                    raise

        if known is not None:
            self._experiment_id = known.experiment_id

        self._client = TracingClient(self._uri)


def _authorization() -> dict[str, str]:
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
