"""What a recipe's section `tracing` asks for, checked before a run creates anything."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from collector import received, request_of_json

from agentevo.config import RunConfig, build_config
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.observability.tracing import check_tracing, open_tracing
from agentevo.observability.tracing.spans import run_resource
from agentevo.store.call_log import AttemptCalls, CallLog


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "MLFLOW_")):
            monkeypatch.delenv(name)


def config_of(folder: Path, **keys: Any) -> RunConfig:
    return build_config(
        {
            "run": {"dir": str(folder)},
            "model": {"name": "tiny"},
            "environment": {"type": "coins"},
            "tracing": keys,
        }
    )


@pytest.mark.parametrize("backend", ["otlp", "jsonl", "mlflow"])
def test_without_the_extra_a_recipe_that_asks_for_tracing_is_refused_with_the_remedy(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    check_tracing(config_of(tmp_path))
    config = config_of(tmp_path, backend=backend)
    with monkeypatch.context() as disabled:
        disabled.setenv("OTEL_SDK_DISABLED", "true")
        check_tracing(config)
    with pytest.raises(MissingExtraError, match=rf"{backend} .*pip install 'agentevo\[tracing\]'"):
        check_tracing(config)
    with pytest.raises(MissingExtraError):
        open_tracing(config, process="trainer", notify=print, is_remote=False)
    assert list(tmp_path.iterdir()) == []


def test_mlflow_without_its_package_needs_a_server(tmp_path: Path) -> None:
    check_tracing(config_of(tmp_path, backend="mlflow", endpoint="http://127.0.0.1:5000"))
    with pytest.raises(MissingExtraError, match="pip install mlflow"):
        check_tracing(config_of(tmp_path, backend="mlflow"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ],
)
def test_a_variable_that_is_no_number_or_no_protocol_of_ours_is_named(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        check_tracing(config_of(tmp_path, backend="otlp"))


def test_spans_go_to_a_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a%20b")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")  # which the SDK does not take
    lines: list[str] = []

    async def scenario() -> None:
        async def opened() -> Any:
            return Nowhere()

        config = config_of(tmp_path, backend="jsonl", max_queue=3)
        opening = open_tracing(config, process="a/b", notify=lines.append, is_remote=False)
        async with opening as tracer, CallLog(opened, tracing=tracer) as log:
            with AttemptCalls(log, "t/train@3#1").attempt("Player"):
                pass

    asyncio.run(scenario())
    assert lines == ["tracing: 1 spans were exported"]
    (path,) = (tmp_path / "tracing").glob("a_b-*.jsonl")
    (span,) = received(request_of_json(path.read_bytes()))
    assert span.name == "invoke_agent Player"
    assert span.resource["team"] == "a b"
    assert span.resource["service.name"] == "agentevo"


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "players")
    assert run_resource().attributes["service.name"] == "players"
