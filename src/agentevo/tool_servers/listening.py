"""Serving an application over HTTP until the process is asked to stop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentevo.console import to_stderr
from agentevo.credentials import REFERENCE
from agentevo.errors import ConfigError, EngineError
from agentevo.event_loop import run_coroutine
from agentevo.inference.address import is_this_machine
from agentevo.inference.http_server import open_socket, url_of
from agentevo.signals import LOOK_S, asked_to_stop

MAX_HEADER_BYTES = 64 * 2**10
MAX_CONNECTIONS = 2048
GRACE_S = 2
"""How long answers that are on their way get when the server ends, in seconds."""


def read_key(reference: str | None, host: str) -> str | None:
    """The key that clients have to show: `${env:NAME}` of `--api-key`. Raises ConfigError for none
    where machines other than this one could ask."""
    if reference is None:
        if is_this_machine(host):
            return None
        raise ConfigError(
            f"--host {host}: others could ask as well: give a key, --api-key '${{env:NAME}}'"
        )
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigError("--api-key: write ${env:NAME}, not the key itself")
    key = os.environ.get(found[1])
    if not key or not key.isascii():
        raise ConfigError(
            f"--api-key: the environment variable {found[1]} should hold a key of ASCII characters"
        )
    return key


def listen(app: Any, host: str, port: int, *, what: str, path: str) -> None:
    """Serves until the process is asked to stop, and says at which URL. Raises ConfigError where it
    can't listen."""
    with open_socket(host, port) as listener, asked_to_stop() as stop:
        to_stderr(f"serving {what} at {url_of(listener)}{path}")
        run_coroutine(serve_until(app, listener, stop))


async def serve_until(app: Any, listener: socket.socket, stop: Callable[[], bool]) -> None:
    """Serves until `stop` says so. Raises EngineError if the server ends by itself."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are the caller's

    server = Server(
        uvicorn.Config(
            app,
            http="h11",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not stop():
            if serving.done():
                raise EngineError("the server has ended by itself") from serving.exception()
            await asyncio.sleep(LOOK_S)
    finally:
        server.should_exit = True
        await asyncio.wait([serving])
