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
import socket
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from agentevo.errors import ConfigError
from agentevo.inference.serving.admission import AdmissionLimits, AdmittedConnection
from agentevo.inference.serving.http_server import is_own_host, open_socket, serving, url_of
from agentevo.runtime.console import to_stderr
from agentevo.runtime.credentials import key_of
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

    return key_of("--api-key", reference)


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

        if self._key is None and not is_own_host(Headers(scope=scope).get("host", "")):
            refusal = _refusal(421, "use its address or localhost, or start it with a key")
            await refusal(scope, receive, send)
            return

        connection: AdmittedConnection = scope["state"]["connection"]
        if not connection.admit():
            await _refusal(503, "too many connections: try again")(scope, receive, send)
            return

        try:
            try:
                async with asyncio.timeout(BODY_S):
                    has_arrived = await _read(receive)
            except TimeoutError:
                refusal = _refusal(408, f"the body has not come within {BODY_S:g} s")
                await refusal(scope, receive, send)
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
        shown = Headers(scope=scope).get("authorization", "").encode("latin-1")
        return hmac.compare_digest(shown, f"Bearer {self._key}".encode())


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


def _refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": {"message": why}}, status, {"connection": "close"})
