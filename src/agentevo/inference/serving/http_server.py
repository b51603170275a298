"""HTTP servers: a listening socket, its URL, and a uvicorn server on it with limits for connections
(`admission.py`)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from agentevo.errors import ConfigError, EngineError
from agentevo.inference.serving.admission import Admission, AdmissionLimits

MAX_HEADER_BYTES = 16 * 2**10
GRACE_S = 2
"""How long unfinished answers may continue when the server ends, in seconds."""


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound and listening; port 0 chooses a free port. Raises ConfigError if that
    fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(
            family, kind, protocol
        )  # without the protocol asyncio does not recognise TCP, and answers wait 40 ms
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is no valid host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"can't listen on {host}:{port} ({reason}): give another --host or --port"
        ) from error

    return listener


def is_own_host(header: str, names: Collection[str] = ("localhost",)) -> bool:
    """Whether a `Host` header names this server. It must be one of the server's names in lower
    case, or any IP address, since no website has an address as its name. A website whose host name
    points at this machine (DNS rebinding) sends its own name."""
    name = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
    name = name.lower().rstrip(".")
    if name in names:
        return True

    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False

    return True


def url_of(listening: socket.socket, *, encrypted: bool = False) -> str:
    """The URL at which other processes reach the socket. If the socket listens on all interfaces,
    the URL has the machine's name."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _HttpServer(uvicorn.Server):
    """Leaves connections to `Admission`, and signals to the caller."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        limits: AdmissionLimits,
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return

        admission = Admission(
            self._listener, self.config, self.server_state, self._tls, self._limits
        )
        self.servers = [admission]  # type: ignore[list-item]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    close: Callable[[], Awaitable[None]] | None = None,
    tls: ssl.SSLContext | None = None,
    limits: AdmissionLimits | None = None,
    lifespan: Literal["on", "off"] = "off",
    max_header_bytes: int = MAX_HEADER_BYTES,
    **settings: Any,
) -> AsyncIterator[None]:
    """Serves on the socket while the block runs, then awaits `close` and ends. `lifespan`: whether
    the application is notified of its start and end. `settings` are uvicorn's; without `ws` it
    takes no WebSockets. Raises EngineError if the server does not start."""
    limits = limits or AdmissionLimits()
    server = _HttpServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # no lines on strangers' invalid input, nor headers (DEBUG)
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan=lifespan,
            h11_max_incomplete_event_size=max_header_bytes,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=int(limits.idle_s),
            interface="asgi3",
            **{"ws": "none", **settings},
        ),
        listener,
        tls,
        limits,
    )
    task = asyncio.ensure_future(server.serve())
    try:
        while not server.started:
            if task.done():
                raise EngineError("the server did not start") from task.exception()
            await asyncio.sleep(0.01)
        yield
    finally:
        if close is not None:
            await close()
        server.should_exit = True
        await task
        listener.close()
