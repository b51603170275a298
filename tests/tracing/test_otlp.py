"""The exporter to a collector: what OpenTelemetry's variables say of it, and what it tells."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from collector import Collector

from agentevo.errors import ConfigError
from agentevo.inference.certificate import new_certificate
from agentevo.tracing.otlp import OTLP, ExportError
from agentevo.tracing.span import Source, Span

SOURCE = Source(attributes={"service.name": "test"}, version="1")
SPAN = Span(
    name="chat tiny",
    kind="internal",
    trace_id=1,
    span_id=2,
    parent_id=None,
    start_ns=1,
    end_ns=2,
    own={"words": "many words " * 100},
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def export(endpoint: str | None = None, **options: Any) -> None:
    exporter = OTLP(SOURCE, endpoint, **options)
    try:
        exporter.open()
        exporter.export([exporter.made(SPAN)])
    finally:
        exporter.close()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_an_endpoint_is_a_base_url_or_the_whole(path: str) -> None:
    with Collector() as collector:
        if path.endswith("traces/"):
            with pytest.raises(ExportError, match="404"):  # it is asked as it was given
                export(collector.url + path)
        else:
            export(collector.url + path)
            assert [span.name for span in collector.spans] == ["chat tiny"]


@pytest.mark.parametrize("form", ["", "TRACES_"])
@pytest.mark.parametrize("packing", ["gzip", "deflate", "none", ""])
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

        export(headers={"x-more": "1"})
        (headers,) = collector.headers

    assert collector.spans[0].attributes["words"] == SPAN.own["words"]
    assert (headers["x-key"], headers["x-more"]) == ("a b", "1")
    assert headers["authorization"] == "Basic c=="
    assert headers.get("content-encoding", "none") == (packing or "none")
    assert (int(headers["content-length"]) < 500) == (packing in ("gzip", "deflate"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PROTOCOL", "grpc", "tracing.endpoint"),
        ("COMPRESSION", "zstd", "gzip, deflate or none"),
        ("TIMEOUT", "soon", "seconds"),
        ("TIMEOUT", "0", "seconds"),
        ("TIMEOUT", "nan", "seconds"),
        ("CERTIFICATE", "not/there.pem", "CERTIFICATE"),
        ("CLIENT_CERTIFICATE", "not/there.pem", "_CLIENT_CERTIFICATE"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with pytest.raises(ConfigError, match=f"OTEL_EXPORTER_OTLP_.*{words}"):
        export()


def test_a_file_that_is_no_certificate_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(path))
    with pytest.raises(ConfigError, match="_CERTIFICATE"):
        export()


def test_grpc_in_the_environment_is_no_matter_where_the_recipe_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with Collector() as collector:
        export(collector.url)
    assert len(collector.spans) == 1


@pytest.mark.parametrize("status", [400, 429, 503, 302])
def test_what_a_collector_answers_is_told(status: int) -> None:
    with (
        Collector(answer=lambda: status) as collector,
        pytest.raises(ExportError, match=f"did not take 1 spans: it answered {status}"),
    ):
        export(collector.url)


def test_a_collector_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(ExportError, match=r"^http://127\.0\.0\.1:1/v1/traces did not") as error:
        export("http://someone:hush@127.0.0.1:1")
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "localhost:4318", "http://", "ftp://a", "http://a:hus/h@b"]
)
def test_what_is_no_url_of_a_collector_is_refused_at_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is no URL") as error:
        export(endpoint)
    assert "hus" not in str(error.value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is no URL"):
        export()


@pytest.mark.parametrize(
    "headers",
    [
        "authorization=Bearer hush%0d%0a x",
        "a b=hush",
        "x=hush%00",
        "x=husché",
        "content-length=5",
        "hush",
    ],
)
def test_a_header_that_can_not_be_is_refused_without_its_value(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        export()
    assert "hus" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "nonsense://x"),
        ("NO_PROXY", "localhost,[::1]"),
        ("SSL_CERT_FILE", "not/there"),
    ],
)
def test_variables_of_the_network_that_can_not_be_followed_are_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        export("http://127.0.0.1:1")


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


@pytest.mark.slow
def test_a_connection_is_kept_and_one_that_was_closed_meanwhile_is_made_anew() -> None:
    with Odd(drops=[3]) as server:
        exporter = OTLP(SOURCE, server.url)
        made = [exporter.made(SPAN)]
        exporter.export(made)
        exporter.export(made)
        assert server.num_connections == 1

        exporter.export(made)
        assert (server.num_connections, server.num_requests) == (2, 4)
        exporter.close()

    with Odd(drops=[1, 2]) as server, pytest.raises(ExportError, match="RemoteProtocolError"):
        export(server.url)


def test_an_answer_without_an_end_is_not_read_to_it() -> None:
    with (
        Odd(words=b"because " * 20_000) as server,
        pytest.raises(ExportError, match="it answered 400 Bad Request: because") as error,
    ):
        export(server.url)
    assert len(str(error.value)) < 500


def test_tls_is_checked_against_the_given_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.pem"
    file.write_text(new_certificate(["127.0.0.1"]))
    with Collector() as collector:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        plain = collector._server.socket
        collector._server.socket = context.wrap_socket(plain, server_side=True)
        url = collector.url.replace("http", "https")
        with pytest.raises(ExportError, match="certificate verify failed"):
            export(url)

        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(file))
        export(url)

    assert len(collector.spans) == 1
