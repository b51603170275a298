"""The SDK's exporter to a collector as we make it: its endpoint, what the environment says, and
collectors that answer whatever they like."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest
from collector import Collector
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from agentevo.errors import ConfigError
from agentevo.observability.tracing.first_warning import FirstWarning
from agentevo.observability.tracing.otlp import MAX_ANSWER_BYTES, collector_exporter

SPAN = ReadableSpan(
    "chat tiny",
    context=SpanContext(1, 2, False, TraceFlags(1)),
    resource=Resource({"service.name": "test"}),
    attributes={"words": "many words " * 100},
    start_time=1,
    end_time=2,
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_") or name.endswith("_CA_BUNDLE"):
            monkeypatch.delenv(name)


def export(endpoint: str | None = None, *, number: int = 1, **options: Any) -> str:
    """What is told while a span is exported so often."""
    lines: list[str] = []
    warning = FirstWarning(lines.append).open()
    try:
        exporter = collector_exporter(endpoint, **options)
        for _ in range(number):
            exporter.export([SPAN])
        exporter.shutdown()
    finally:
        warning.close()
    return "\n".join(lines)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_an_endpoint_is_a_base_url_or_the_whole(path: str) -> None:
    with Collector() as collector:
        told = export(collector.url + path)
        if path.endswith("traces/"):
            assert "Not Found" in told  # it is asked as it was given
        else:
            assert told == ""
            assert [span.name for span in collector.spans] == ["chat tiny"]


@pytest.mark.parametrize("form", ["", "TRACES_"])
@pytest.mark.parametrize("packing", ["gzip", "none"])
def test_the_environment_says_where_and_how(
    form: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        own = f"OTEL_EXPORTER_OTLP_{form}"
        whole = collector.url + ("/v1/traces" if form else "")
        for name, value in (
            ("ENDPOINT", whole),
            ("HEADERS", "x-key=a%20b, Authorization=Basic c=="),
            ("COMPRESSION", packing.upper()),
            ("TIMEOUT", "60"),
            ("PROTOCOL", "http/protobuf"),
        ):
            monkeypatch.setenv(own + name, value)

        assert export(headers={"x-more": "1"}) == ""
        (headers,) = collector.headers

    assert collector.spans[0].attributes == SPAN.attributes
    assert (headers["x-key"], headers["x-more"]) == ("a b", "1")
    assert headers["authorization"] == "Basic c=="
    assert headers.get("content-encoding", "none") == packing
    assert (int(headers["content-length"]) < 500) == (packing == "gzip")


def test_grpc_is_refused_where_the_environment_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is grpc.*tracing.endpoint"):
        export()
    with Collector() as collector:
        export(collector.url)
    assert len(collector.spans) == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("COMPRESSION", "zstd", "zstd"),
        ("TIMEOUT", "soon", "soon"),
        ("CERTIFICATE", "not/there.pem", "not/there.pem"),
        ("HEADERS", "hush", "OTEL_EXPORTER_OTLP_HEADERS has a piece"),
        ("HEADERS", "a b=hush", "OTEL_EXPORTER_OTLP_HEADERS has a piece"),
        ("HEADERS", "x=hush;a", "OTEL_EXPORTER_OTLP_HEADERS has a piece"),
    ],
)
def test_a_variable_that_opentelemetry_can_not_follow_is_told_once(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with Collector() as collector:
        url = collector.url.replace("http:", "https:") if name == "CERTIFICATE" else collector.url
        told = export(url, number=2)
    assert words in told
    assert "hush" not in told
    assert told.count("\n") == 0


@pytest.mark.parametrize("headers", ["authorization=Bearer hush%0d%0a x", "x=hush%00", "x=husché"])
def test_a_header_that_can_not_be_is_refused_without_its_value(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        export()
    assert "hus" not in str(error.value)


@pytest.mark.parametrize("status", [400, 500])
def test_what_a_collector_answers_is_told_once(status: int) -> None:
    with Collector(answer=lambda: status) as collector:
        told = export(collector.url, number=3)
    assert str(status) in told
    assert told.count("\n") == 0


@pytest.mark.slow
def test_a_collector_that_is_not_there_is_told_of_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    told = export("http://someone:hush@127.0.0.1:1")
    assert "refused" in told
    assert "hush" not in told


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "localhost:4318", "http://", "ftp://a", "http://a:hus/h@b"]
)
def test_what_is_no_url_of_a_collector_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is not a valid URL") as error:
        export(endpoint)
    assert "hus" not in str(error.value)


class Odd:
    """A server that keeps connections, counts them, and closes one instead of the answers whose
    numbers are in `drops`. A refusal says `words`."""

    def __init__(self, drops: Sequence[int] = (), words: bytes = b"") -> None:
        self.num_connections = self.num_requests = 0
        odd = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                odd.num_connections += 1

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                odd.num_requests += 1
                if odd.num_requests in drops:
                    self.close_connection = True
                    return

                self.send_response(400 if words else 200)
                self.send_header("content-length", str(10**9 if words else 0))
                self.end_headers()

                with suppress(OSError):
                    self.wfile.write(words)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_connection_is_kept_and_one_that_was_closed_meanwhile_is_made_anew() -> None:
    with Odd(drops=[3]) as server:
        assert export(server.url, number=2) == ""
        assert server.num_connections == 1
        assert export(server.url, number=2) == ""
        assert (server.num_connections, server.num_requests) == (3, 5)


def test_an_answer_without_an_end_is_not_read_to_it() -> None:
    with Odd(words=b"because " * (MAX_ANSWER_BYTES // 4)) as server:
        assert "Bad Request" in export(server.url)


def test_what_opentelemetry_logs_elsewhere_is_not_swallowed() -> None:
    export("http://127.0.0.1:1", number=0)
    logger = logging.getLogger("opentelemetry")
    assert logger.propagate
    assert not logger.handlers
