"""Spans for a tracking server of MLflow, as one answers; `make test-trackers` asks a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from collector import received
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from agentevo.observability.tracing.mlflow import EXPERIMENT_HEADER, MLflowError, MLflowExporter

SPAN = ReadableSpan(
    "chat tiny",
    context=SpanContext(1, 2, False, TraceFlags(1)),
    resource=Resource({}),
    start_time=1,
    end_time=2,
)


class Server:
    """A tracking server with the experiments of `experiments`. Of the first `refusals` requests
    each is answered 503; another process makes the experiment where `is_raced`."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.refusals = 0
        self.is_raced = False
        self.spans: list[tuple[str, str, str]] = []
        """Experiment, authorization and name of each."""


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("experiment_name=")[2]
            self.answer_experiment(name, {"experiment": {"experiment_id": "7"}})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                headers = (self.headers[EXPERIMENT_HEADER], self.headers["authorization"])
                server.spans += [(*headers, span.name) for span in received(body)]
                self.answer(200, {})
                return

            name = json.loads(body)["name"]
            is_known = server.is_raced or name in server.experiments
            server.experiments[name] = "7"
            if is_known:
                self.answer(400, {"error_code": "RESOURCE_ALREADY_EXISTS"})
            else:
                self.answer(200, {"experiment_id": "7"})

        def answer_experiment(self, name: str, content: object) -> None:
            if server.refusals:
                server.refusals -= 1
                self.answer(503, {})
            elif name in server.experiments:
                self.answer(200, content)
            else:
                self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})

        def answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize("state", ["new", "known", "raced"])
def test_a_server_gets_spans_in_its_experiment(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "key")
    server = Server()
    server.is_raced = state == "raced"
    if state == "known":
        server.experiments["coins"] = "7"
    with serving(server) as url:
        exporter = MLflowExporter(url, "coins")
        assert exporter.export([SPAN]) is SpanExportResult.SUCCESS
        exporter.shutdown()
    assert server.spans == [("7", "Bearer key", "chat tiny")]


def test_a_server_that_does_not_answer_yet_is_asked_again_by_the_next_export() -> None:
    server = Server()
    server.refusals = 1
    with serving(server) as url:
        exporter = MLflowExporter(url, "coins")
        with pytest.raises(MLflowError, match="answered 503"):
            exporter.export([SPAN])
        assert exporter.export([SPAN]) is SpanExportResult.SUCCESS
    assert len(server.spans) == 1
