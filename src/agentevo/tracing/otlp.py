"""Spans over OTLP/HTTP to a collector, as protobuf."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import httpx

from agentevo.errors import AgentEvoError, describe_error
from agentevo.tracing import otlp_settings as settings
from agentevo.tracing.otlp_proto import encoded_span, request
from agentevo.tracing.span import Source, Span

LONGEST_ANSWER = 65536
"""Bytes of a collector's answer that are read."""
LONGEST_SHOWN = 300
"""Bytes of a refusal that are shown."""
_PACKED: dict[str | None, Callable[[bytes], bytes]] = {
    None: lambda body: body,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}


class ExportError(AgentEvoError):
    """A collector has not taken spans in."""


class OTLP:
    """An exporter to a collector. `endpoint`: its base URL, else what the environment says
    (otlp_settings.py); `headers` are sent beside those of the environment."""

    def __init__(
        self,
        source: Source,
        endpoint: str | None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ConfigError for what the environment's variables say wrong."""
        self._source = source
        self._url = settings.trace_url(endpoint)
        self._where = settings.shown_url(self._url)
        self._timeout_s = settings.timeout_s()
        packing = settings.compression()
        self._pack = _PACKED[packing]
        self._client = settings.client(
            {
                **settings.headers(),
                **(headers or {}),
                "content-type": "application/x-protobuf",
                "accept-encoding": "identity",
                **({} if packing is None else {"content-encoding": packing}),
            }
        )

    def open(self) -> None:
        """See Exporter."""

    def made(self, span: Span) -> bytes:
        """See Exporter."""
        return encoded_span(span)

    def export(self, made: Sequence[bytes]) -> None:
        """See Exporter."""
        if not made:
            return

        body = self._pack(request(made, self._source))
        try:
            try:
                problem = self._refusal(body)
            except httpx.RemoteProtocolError:  # the server has closed a connection that was kept
                problem = self._refusal(body)
        except httpx.HTTPError as error:
            problem = describe_error(error)

        if problem:
            raise ExportError(f"{self._where} did not take {len(made)} spans: {problem}")

    def _refusal(self, body: bytes) -> str:
        """Sends a request. Why it was refused; empty where it was not."""
        until = time.monotonic() + self._timeout_s
        said = b""
        with self._client.stream("POST", self._url, content=body) as answer:
            for piece in answer.iter_raw():
                said += piece
                if len(said) > LONGEST_ANSWER or time.monotonic() > until:
                    break

        if answer.is_success:
            return ""

        words = said[:LONGEST_SHOWN].decode("utf-8", "replace")
        return (
            f"it answered {answer.status_code} {answer.reason_phrase}{': ' if words else ''}{words}"
        )

    def close(self) -> None:
        """See Exporter."""
        self._client.close()
