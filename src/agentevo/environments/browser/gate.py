"""The gate through which an episode's context reaches hosts: a SOCKS5 proxy (RFC 1928) on this
machine that connects to permitted hosts and ports only.

A context has no other way out, so the permissions hold for whatever makes a connection, also for
what the interception of requests does not see: redirects, and the requests of shared workers. The
gate passes bytes on and reads none of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress

from agentevo.environments.browser.permissions import Permissions

HANDSHAKE_S = 30.0
"""The longest time for what Chromium says at the beginning of a connection, in seconds."""
CONNECT_S = 30.0
"""The longest time for a connection to a host, in seconds."""
CLOSE_S = 5.0
"""The longest time for the end of a connection, in seconds."""
PIECE_BYTES = 2**16

_VERSION = 5
_CONNECT = 1
_IPV4 = 1
_NAME = 3
_IPV6 = 4
_SUCCEEDED = 0
_NOT_ALLOWED = 2
_UNREACHABLE = 4
_NOT_SUPPORTED = 7


class HostGate:
    """See the module. All methods are coroutines of the browser's loop."""

    def __init__(self, permissions: Permissions, on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` gets `HOST:PORT` of each connection that is not allowed."""
        self._permissions = permissions
        self._on_refusal = on_refusal
        self._server: asyncio.Server | None = None
        self._tunnels: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> int:
        """Begins to listen at an address of this machine. Returns the port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        for tunnel in self._tunnels:
            tunnel.cancel()
        await asyncio.gather(*self._tunnels, return_exceptions=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        tunnel = asyncio.current_task()
        assert tunnel is not None
        self._tunnels.add(tunnel)
        try:
            # Either side has gone, or `close` has ended the tunnel.
            with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                await self._pass(reader, writer)
        finally:
            self._tunnels.discard(tunnel)
            await _close(writer)

    async def _pass(self, reader: StreamReader, writer: StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            address = await _read_address(reader, writer)

        if address is None:
            _reply(writer, _NOT_SUPPORTED)
            return
        if not self._permissions.allow_connection(*address):
            self._on_refusal("{}:{}".format(*address))
            _reply(writer, _NOT_ALLOWED)
            return

        try:
            async with asyncio.timeout(CONNECT_S):
                host_reader, host_writer = await asyncio.open_connection(
                    *address, happy_eyeballs_delay=0.25
                )
        except (OSError, TimeoutError, UnicodeError):  # UnicodeError: a name that DNS can't have
            _reply(writer, _UNREACHABLE)
            return

        try:
            _reply(writer, _SUCCEEDED)
            await _exchange((reader, host_writer), (host_reader, writer))
        finally:
            await _close(host_writer)


async def _read_address(reader: StreamReader, writer: StreamWriter) -> tuple[str, int] | None:
    """The host and port to which Chromium asks for a connection. None for another request."""
    version, num_methods = await reader.readexactly(2)
    await reader.readexactly(num_methods)
    if version != _VERSION:
        return None

    writer.write(bytes([_VERSION, 0]))  # no password
    _, command, _, kind = await reader.readexactly(4)
    if command != _CONNECT:
        return None

    if kind == _NAME:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode("ascii", "replace")
    elif kind in (_IPV4, _IPV6):
        host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == _IPV4 else 16)))
    else:
        return None

    return host, int.from_bytes(await reader.readexactly(2))


def _reply(writer: StreamWriter, status: int) -> None:
    """Answers the request for a connection. The address in it means nothing to Chromium."""
    writer.write(bytes([_VERSION, status, 0, _IPV4]) + bytes(6))


async def _exchange(*ways: tuple[StreamReader, StreamWriter]) -> None:
    """Passes bytes on in both directions, until one side ends."""
    copies = [asyncio.ensure_future(_copy(reader, writer)) for reader, writer in ways]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


async def _close(writer: StreamWriter) -> None:
    """Closes a connection after what was written to it."""
    writer.close()
    with suppress(OSError, TimeoutError):  # the other side has gone, or does not read
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
