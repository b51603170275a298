"""MLflow: a tracking server, or a database file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerConfig,
    TrackingBegun,
    flat,
)
from agentevo.runtime.credentials import with_environment

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_METRICS_PER_REQUEST = 500
"""The maximum number of metrics in a request. MLflow accepts 1000."""
MAX_PARAMETER_CHARS = 500
MAX_PARAMETERS = 100
"""The maximum number of parameters in a request."""


class MLflowConfig(TrackerConfig):
    """MLflow. MLflow reads its own credentials: MLFLOW_TRACKING_USERNAME and _PASSWORD, or
    _TOKEN."""

    tracking_uri: str | None = Field(default=None, min_length=1)
    """http://HOST:PORT, or sqlite:////PATH/mlruns.db. Write a password in it as
    ${env:NAME}. Default: MLFLOW_TRACKING_URI, else MLflow's own."""


class MLflow(Tracker):
    """MLflow: steps, parameters, attempts as a table, plots and files as artifacts."""

    Config = MLflowConfig
    packages = (("mlflow", "mlflow"),)

    def begin(self, run: TrackedRun) -> TrackingBegun:
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        uri = self.config.tracking_uri
        self._client = client = MlflowClient(
            tracking_uri=None if uri is None else with_environment(uri)
        )
        if run.resumed:
            self._id = run.id
            client.update_run(self._id, status="RUNNING")
            return TrackingBegun(self._id)

        experiment = client.get_experiment_by_name(run.project)
        experiment_id = client.create_experiment(run.project) if experiment is None else None

        tags = {"agentevo.kind": run.kind, "mlflow.note.content": run.notes}
        tags |= {f"agentevo.tag.{tag}": "true" for tag in run.tags}
        if run.group:
            tags["agentevo.group"] = run.group

        created = client.create_run(
            experiment_id if experiment is None else experiment.experiment_id,
            run_name=run.name,
            tags={name: value for name, value in tags.items() if value},
        )
        self._id = created.info.run_id
        self._parameters(flat(run.config))
        client.log_dict(self._id, dict(run.config), "config.yaml")

        place = f"#/experiments/{created.info.experiment_id}/runs/{self._id}"
        is_server = uri is not None and uri.startswith("http")
        words = f"experiment {run.project}, run {run.name} ({self._id})"
        return TrackingBegun(self._id, f"{uri}/{place}" if is_server else words)

    def _parameters(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(_name(key), str(value)[:MAX_PARAMETER_CHARS]) for key, value in values.items()
        ]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MAX_PARAMETERS])

    def log(self, row: TrackedRow) -> None:
        from mlflow.entities import Metric

        stamp = int(row.time * 1000)
        metrics = [
            Metric(_name(name), float(value), stamp, row.step)
            for name, value in row.metrics.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
            self._client.log_batch(
                self._id, metrics=metrics[first : first + MAX_METRICS_PER_REQUEST]
            )

        for table in row.tables:
            columns = zip(*table.rows, strict=True)
            data = {name: list(cells) for name, cells in zip(table.columns, columns, strict=True)}
            self._client.log_dict(self._id, data, f"{table.name}/step-{row.step:06d}.json")

    def figure(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "plots")

    def artifact(self, name: str, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._id, str(path), name)
        else:
            self._client.log_artifact(self._id, str(path))

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, STATES[state], int(time.time() * 1000))


def _name(name: str) -> str:
    """The name, with the characters that MLflow does not allow replaced."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]
