"""Serves an application over HTTP until the process gets a stop signal.

Connections are admitted like the engine's (inference/serving/admission.py): a client that has not
sent the key, or, without a key, the headers of a request, is disconnected after a few seconds.
Without a key the `Host` header must name this machine, so that no web page can send requests. The
time limits are BODY_S for the body of a request, TAKEN_S for the client to read each piece of an
answer, and IDLE_S between two requests. The number of connections is bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from agentevo.errors import ConfigError
from agentevo.inference.serving.admission import AdmissionLimits, AdmittedConnection
from agentevo.inference.serving.http_server import is_own_host, open_socket, serving, url_of
from agentevo.runtime.console import to_stderr
from agentevo.runtime.credentials import REFERENCE
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.http_clients import is_this_machine
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals

MAX_HEADER_BYTES = 64 * 2**10
MAX_CONNECTIONS = 1024
"""The maximum number of connections that have sent the key, and also of those that have not."""
IDLE_S = 120.0
"""How long an idle connection is kept."""
BODY_S = 30.0
"""The time limit for the body of a request to arrive."""
TAKEN_S = 60.0
"""The time limit for the client to read a piece of an answer, or a whole answer."""
BODY_BYTES = 8 * 2**20
"""The maximum bytes of a body that are buffered: the applications refuse longer ones."""


def read_key(reference: str | None, host: str) -> str | None:
    """The key that clients must send: `${env:NAME}` of `--api-key`. Raises ConfigError if there is
    none and other machines could send requests."""
    if reference is None:
        if is_this_machine(host):
            return None
        raise ConfigError(
            f"--host {host}: other machines could connect: give a key, --api-key '${{env:NAME}}'"
        )

    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError("--api-key: write ${env:NAME}, not the key itself")

    key = os.environ.get(match[1])
    if not key or not key.isascii():
        raise ConfigError(
            f"--api-key: the environment variable {match[1]} must have a key of ASCII characters"
        )

    return key


def listen(app: Any, host: str, port: int, *, what: str, path: str, key: str | None = None) -> None:
    """Serves until the process gets a stop signal, and prints the URL. `key`: the key that `app`
    requires of clients. Raises ConfigError if it can't listen."""
    with open_socket(host, port) as listener, catch_stop_signals() as stop:
        to_stderr(f"serving {what} at {url_of(listener)}{path}")
        run_coroutine(serve_until(app, listener, stop, key))


async def serve_until(
    app: Any, listener: socket.socket, stop: Callable[[], bool], key: str | None = None
) -> None:
    """Serves until `stop` is set. Raises EngineError if the server does not start."""
    async with serving(
        _Guarded(app, key),
        listener,
        limits=AdmissionLimits(strangers=MAX_CONNECTIONS, clients=MAX_CONNECTIONS, idle_s=IDLE_S),
        lifespan="on",
        max_header_bytes=MAX_HEADER_BYTES,
    ):
        while not stop():
            await asyncio.sleep(POLL_INTERVAL_S)


class _Guarded:
    """Wraps the application and limits its connections. See the module."""

    def __init__(self, app: Any, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not self._shows_key(scope):
            await self._app(scope, receive, send)  # refuses clients without the key
            return

        if self._key is None and not is_own_host(_header(scope, b"host").decode("latin-1")):
            await _refuse(send, 421, "use its address or localhost, or start it with a key")
            return

        connection: AdmittedConnection = scope["state"]["connection"]
        if not connection.admit():
            await _refuse(send, 503, "too many connections: try again")
            return

        try:
            try:
                async with asyncio.timeout(BODY_S):
                    has_arrived = await _read(receive)
            except TimeoutError:
                await _refuse(send, 408, f"the body has not come within {BODY_S:g} s")
                return

            async def receive_next() -> Any:
                return has_arrived.pop(0) if has_arrived else await receive()

            async def taken(message: Any) -> None:
                try:
                    async with asyncio.timeout(TAKEN_S):
                        await send(message)
                except TimeoutError:
                    connection.cut()

            await self._app(scope, receive_next, taken)
        finally:
            connection.leave()

    def _shows_key(self, scope: Any) -> bool:
        if self._key is None:
            return True
        shown = _header(scope, b"authorization")
        return hmac.compare_digest(shown, f"Bearer {self._key}".encode())


def _header(scope: Any, name: bytes) -> bytes:
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value


async def _read(receive: Any) -> list[Any]:
    """The messages of a request's body, up to BODY_BYTES."""
    messages = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body") or size > BODY_BYTES:
            return messages


async def _refuse(send: Any, status: int, why: str) -> None:
    body = json.dumps({"error": {"message": why}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
