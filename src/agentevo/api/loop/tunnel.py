"""A local port for clients that do not know an encrypted server's certificate. Only this machine
can reach it, and its connections continue to the server, encrypted.

    tunnel = Tunnel(address)
    tunnel.base          http://127.0.0.1:PORT, from the first access on
    tunnel.close()

The fingerprint of its certificate identifies the server: one with another fingerprint receives
nothing. The tunnel has a thread of its own, so it continues while a program blocks its event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
import threading
from concurrent.futures import Future
from contextlib import suppress
from urllib.parse import urlsplit

from agentevo.errors import ConfigError, EngineUnavailableError
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.certificate import fingerprint_of

CONNECT_S = 10.0
PIECE = 2**16


def pinned_context(address: EngineAddress) -> ssl.SSLContext:
    """A TLS context that trusts only the certificate with that fingerprint; blocks. Raises
    ConfigError if the server shows another one, EngineUnavailableError if it does not answer."""
    parts = urlsplit(address.url)
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.minimum_version = ssl.TLSVersion.TLSv1_3
    asking.check_hostname = False
    asking.verify_mode = ssl.CERT_NONE
    try:
        place = (parts.hostname or "", parts.port or 443)
        with (
            socket.create_connection(place, timeout=CONNECT_S) as plain,
            asking.wrap_socket(plain) as encrypted,
        ):
            shown = encrypted.getpeercert(binary_form=True) or b""
    except OSError as error:
        raise EngineUnavailableError(f"{address.url} does not answer: {error}") from error

    fingerprint = fingerprint_of(shown)
    if not hmac.compare_digest(fingerprint, address.certificate):
        raise ConfigError(
            f"{address.url} shows the certificate {fingerprint} and not {address.certificate}, "
            f"which identifies it: it is another server, or an intermediary; nothing was sent"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=shown)

    return context


class Tunnel:
    """See the module."""

    def __init__(self, address: EngineAddress, context: ssl.SSLContext) -> None:
        parts = urlsplit(address.url)
        self._host = parts.hostname or ""
        self._port = parts.port or 443
        self._context = context
        self._lock = threading.Lock()
        self._base: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def base(self) -> str:
        """Its URL; it listens from now on."""
        with self._lock:
            if self._base is None:
                started: Future[str] = Future()
                threading.Thread(
                    target=lambda: asyncio.run(self._serve(started)),
                    name="agentevo-tunnel",
                    daemon=True,
                ).start()
                self._base = started.result(CONNECT_S)

            return self._base

    def close(self) -> None:
        """Ends it, with its connections."""
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, started: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        except OSError as error:
            started.set_exception(error)
            return

        started.set_result(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await self._stop.wait()
        server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side has ended it."""
        far: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far = await asyncio.open_connection(
                    self._host, self._port, ssl=self._context, server_hostname="agentevo"
                )

            ways = [
                asyncio.ensure_future(_pass_on(reader, far)),
                asyncio.ensure_future(_pass_on(far_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except (OSError, TimeoutError):
            pass  # its client sees that the connection ends
        finally:
            for stream in (writer, far):
                if stream is not None:
                    stream.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
