"""Requests of tools with a time limit and a size limit that hold for any server.

An HTTP client's timeout applies to one read, so a server that sometimes sends a byte never exceeds
it. Here all connections of a call are shut down at the call's deadline.
"""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import httpx

from agentevo.errors import ToolError

ENCODING = "gzip"
"""The content encodings that a request accepts: zlib can unpack them step by step."""
_GZIP_ALONE = 16 + zlib.MAX_WBITS


class TimedRequests:
    """The requests of one call. `timed_requests` creates it."""

    def __init__(self, within_s: float) -> None:
        self._until = time.monotonic() + within_s
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def left_s(self) -> float:
        """The remaining time. Raises TimeoutError if there is none."""
        remaining_s = self._until - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no time is left")
        return remaining_s

    def stream(
        self, client: httpx.Client, method: str, url: httpx.URL | str, **options: Any
    ) -> AbstractContextManager[httpx.Response]:
        """The same as the client's `stream`. Raises TimeoutError if no time is left."""
        options["extensions"] = {**options.get("extensions", {}), "trace": self._keep_socket}
        return client.stream(method, url, timeout=self.left_s(), **options)

    def shut_down(self) -> None:
        """Shuts down the connections of these requests, so that a reader sees the end."""
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # the connection is closed
                    # Not SSLSocket.shutdown: it removes the TLS state that the reading thread uses.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _keep_socket(self, event: str, details: dict[str, Any]) -> None:
        """Records the socket. httpx calls it at each step of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            with self._lock:
                self._sockets.append(details["return_value"].get_extra_info("socket"))
            if time.monotonic() >= self._until:
                self.shut_down()


@contextmanager
def timed_requests(within_s: float) -> Iterator[TimedRequests]:
    """Requests with one time limit for all of them together. Raises TimeoutError if the block
    exceeds it."""
    requests = TimedRequests(within_s)
    timer = threading.Timer(within_s, requests.shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield requests
        requests.left_s()  # a connection that was shut down looks like the end of an answer
    except httpx.HTTPError as error:
        requests.left_s()
        if isinstance(error, httpx.TimeoutException):
            raise TimeoutError(str(error)) from error
        raise
    finally:
        timer.cancel()


def read_content(answer: httpx.Response, name: str, max_bytes: int) -> bytes:
    """The unpacked content of an answer. `name` is the answer's name in messages. Raises ToolError
    for more than `max_bytes` and for content that can't be unpacked, and what httpx raises."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", ENCODING):
        raise ToolError(f"{name} answers in the encoding {encoding}, which was not asked for")

    unpacker = zlib.decompressobj(_GZIP_ALONE) if encoding == ENCODING else None
    content = bytearray()
    num_received = 0
    for piece in answer.iter_raw():
        num_received += len(piece)
        if unpacker is None:
            content += piece
        else:
            try:
                content += unpacker.decompress(piece, max_bytes + 1 - len(content))
            except zlib.error as error:
                raise ToolError(f"{name} can't be unpacked: {error}") from error

        if max(len(content), num_received) > max_bytes:
            raise ToolError(f"{name} has more than {max_bytes:,} bytes")
        if unpacker is not None and unpacker.eof:
            break

    return bytes(content)
