"""What OpenTelemetry's variables say of a collector: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS,
_TIMEOUT, _COMPRESSION, _CERTIFICATE, _CLIENT_KEY, _CLIENT_CERTIFICATE, _PROTOCOL and their forms
for traces, as its exporter for Python reads them. No value of a header is in an error."""

from __future__ import annotations

import os
import re
import ssl
from urllib.parse import unquote

import httpx

from agentevo.errors import ConfigError

PATH = "/v1/traces"
TIMEOUT_S = 10.0
COMPRESSIONS = ("gzip", "deflate")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FRAMING = ("connection", "content-length", "host", "transfer-encoding")


def trace_url(endpoint: str | None) -> str:
    """Where spans go: a base URL or the whole, or what the environment says. Raises ConfigError for
    what is no such URL, and where the environment speaks of gRPC."""
    if endpoint is not None:
        return _checked(_with_path(endpoint.strip()), "tracing.endpoint")

    if variable("PROTOCOL").lower() == "grpc":
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and AgentEvo sends spans over HTTP: set "
            "tracing.endpoint to the collector's HTTP address, such as http://HOST:4318, which "
            "counts before the variable"
        )

    if whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip():
        return _checked(whole, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or "http://localhost:4318"
    return _checked(_with_path(base), "OTEL_EXPORTER_OTLP_ENDPOINT")


def _with_path(endpoint: str) -> str:
    return endpoint if endpoint.rstrip("/").endswith(PATH) else endpoint.rstrip("/") + PATH


def _checked(url: str, key: str) -> str:
    try:
        read = httpx.URL(url)
        is_whole = read.scheme in ("http", "https") and bool(read.host)
    except (httpx.InvalidURL, ValueError):
        is_whole = False

    if not is_whole:
        raise ConfigError(
            f"{key} is no URL of a collector: give one such as http://HOST:4318 (in a password, "
            "`/`, `?`, `#` and `@` are written as %2F, %3F, %23 and %40)"
        )

    return url


def shown_url(url: str) -> str:
    """The URL without what may be secret: user, password, query."""
    read = httpx.URL(url)
    return str(read.copy_with(userinfo=b"", query=None, fragment=None))


def variable(name: str) -> str:
    """What the environment says for traces, or for everything."""
    general = f"OTEL_EXPORTER_OTLP_{name}"
    own = f"OTEL_EXPORTER_OTLP_TRACES_{name}"
    return (os.environ.get(own) or os.environ.get(general) or "").strip()


def headers() -> dict[str, str]:
    """`KEY=VALUE,KEY=VALUE`, percent-encoded as the specification has it or not."""
    found = {}
    for pair in filter(str.strip, variable("HEADERS").split(",")):
        key, separator, value = pair.partition("=")
        name = unquote(key.strip()).lower()
        value = unquote(value.strip())

        if not separator or not _NAME.fullmatch(name):
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_HEADERS has a piece that is not KEY=VALUE (pieces are "
                "separated by commas; a comma within a value is %2C)"
            )

        if name in _FRAMING or not (value.isprintable() and value.isascii()):
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_HEADERS: the header {name} can't be set, or has a character "
                "that no header can have"
            )

        found[name] = value

    return found


def timeout_s() -> float:
    """Seconds, as OpenTelemetry's exporters for Python read it."""
    text = variable("TIMEOUT")
    try:
        seconds = float(text or TIMEOUT_S)
    except ValueError:
        seconds = 0.0

    if not 0 < seconds < 1e6:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT is {text[:40]!r}: give seconds, above 0")
    return seconds


def compression() -> str | None:
    """One of COMPRESSIONS, or none."""
    name = variable("COMPRESSION").lower()
    if name in ("", "none"):
        return None

    if name not in COMPRESSIONS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_COMPRESSION is {name[:40]!r}: give gzip, deflate or none"
        )

    return name


def client(sent: dict[str, str]) -> httpx.Client:
    """A client that sends these headers, and goes through the proxy that the environment names. It
    keeps its connection from one batch to the next."""
    trusted = variable("CERTIFICATE")
    own = variable("CLIENT_CERTIFICATE")
    context: ssl.SSLContext | bool = True
    if trusted or own:
        try:
            context = ssl.create_default_context(cafile=trusted or None)
            if own:
                context.load_cert_chain(own, variable("CLIENT_KEY") or None)
        except OSError as error:
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY names a file "
                f"that can't be used: {error}"
            ) from error

    limits = httpx.Limits(max_connections=1, keepalive_expiry=60.0)
    try:
        return httpx.Client(headers=sent, timeout=timeout_s(), verify=context, limits=limits)
    except Exception as error:  # of as many kinds as there are variables
        raise ConfigError(
            "no client for spans can be made: what HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, "
            f"SSL_CERT_FILE or SSL_CERT_DIR says can't be used ({type(error).__name__}: {error})"
        ) from error
