"""Limits connections to an engine's server: how many there are, and how long each may stay open
before it shows the run's secret.

A new connection belongs to a stranger until the server admits it (`admit`). The server admits it
when a request on it shows the secret. A stranger that has not shown it within ADMISSION_S is cut
off in any state: before the first byte, in the TLS handshake, in a header or after a refusal. There
are at most MAX_STRANGERS. When there are too many, the oldest one makes room, silent connections
before those that have sent something, so a peer that only holds connections open can't keep clients
out. A connection gets a transport and a protocol only with its first byte. While strangers displace
one another, accepting takes ACCEPTING_SHARE of the event loop's time, because the engine's steps
need the rest. At most MAX_CLIENTS are admitted. Other servers may set other `AdmissionLimits`.

While a peer connects faster than that, some clients may get no answer.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import socket
import ssl
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

ADMISSION_S = 5.0
MAX_STRANGERS = 128
MAX_CLIENTS = 256
ACCEPTED_AT_ONCE = 64
"""The most connections that are accepted between two steps of the engine, which run on the same
event loop."""
ACCEPTING_SHARE = 0.1
DELIVERY_POLL_S = 0.01
"""How often to check whether the client has received a long answer."""
POLL_INTERVAL_S = 0.5
"""How often to check how long the strangers have been connected."""
NO_HANDLE_PAUSE_S = 0.1
"""The pause before the next try when the process has no file descriptor left."""
SHUTDOWN_S = 1.0
"""The time limit for closing TLS."""
BUFFERED_BYTES = 65536
"""The number of unsent bytes of an answer that the server does not wait for: the client's own
buffers may hold as many."""
_NO_HANDLE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many connections there may be, and how many seconds a connection may stay open after its
    answer."""

    strangers: int = field(default_factory=lambda: MAX_STRANGERS)
    clients: int = field(default_factory=lambda: MAX_CLIENTS)
    idle_s: float = ADMISSION_S


class AdmittedConnection:
    """One accepted connection; see `Admission`."""

    def __init__(self, admission: Admission, accepted: socket.socket, until: float) -> None:
        self._admission = admission
        self.socket: socket.socket | None = accepted
        """None once `_open` has begun."""
        self.until = until
        """The time at which the connection is cut off if it still belongs to a stranger."""
        self.opening: asyncio.Task[None] | None = None
        """The task that opens the connection, from the first byte until TLS is established."""
        self.transport: asyncio.Transport | None = None
        self.protocol: _HttpProtocol | None = None
        self.is_lost = False
        self._had_all = False
        """Whether the peer had received all bytes when the connection was lost."""
        self._when_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Calls `on_lost` when the connection is lost, or immediately if it is lost already. None
        stops the watch. Call this after the request's body was read. The watch also reads later
        bytes, because only reading reveals that a client hangs up."""
        self._when_lost = on_lost
        if on_lost is not None and self.is_lost:
            on_lost()
        elif on_lost is not None and self.protocol is not None:
            self.protocol.flow.resume_reading()

    async def received_all(self, within_s: float) -> bool:
        """Whether the peer has received all written bytes, except at most BUFFERED_BYTES bytes,
        which may still be in its machine's buffers. False if the connection is lost, or the peer
        received nothing more for `within_s`. Call this before the answer ends, since the next
        request begins after that."""
        if self.is_lost or self.transport is None or self.transport.is_closing():
            return False  # a transport that closes discards what is written to it
        if (num_remaining := self._num_undelivered()) <= BUFFERED_BYTES:
            return True

        lost_event = asyncio.Event()
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        self.watch(lost_event.set)

        try:
            while num_remaining and not self.is_lost:
                with suppress(TimeoutError):
                    async with asyncio.timeout(DELIVERY_POLL_S):
                        await lost_event.wait()

                before = num_remaining
                num_remaining = self._num_undelivered()
                if num_remaining < before:
                    until = loop.time() + within_s
                elif num_remaining and loop.time() >= until:
                    return False
        finally:
            self.watch(None)

        return self._had_all if self.is_lost else True

    def _num_undelivered(self) -> int:
        """The number of written bytes that the peer's machine has not acknowledged; if this system
        does not report it, the number of bytes that are still in this process. More than
        BUFFERED_BYTES if the number is unknown."""
        assert self.transport is not None
        if self.is_lost:
            return 0

        try:
            waiting = self.transport.get_write_buffer_size()
        except AttributeError:  # asyncio's TLS after a second close
            return BUFFERED_BYTES + 1

        connected = self.transport.get_extra_info("socket")
        if connected is None or not sys.platform.startswith("linux"):
            return int(waiting)

        try:
            unacknowledged = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return int(waiting)

        return int(waiting) + int.from_bytes(unacknowledged, sys.byteorder)

    def cut(self) -> None:
        """Closes the connection immediately and discards unsent data."""
        if self.transport is not None:
            self.transport.abort()

    def admit(self) -> bool:
        """Marks the connection as a client's, because it showed the secret. False if there are too
        many clients already."""
        return self._admission.admit(self)

    def leave(self) -> None:
        """Marks the connection as one that has its answer and should end soon."""
        self._admission.leave(self)

    def lost(self, error: Exception | None = None) -> None:
        """Records that the connection is lost. `error`: the reason; None if the peer closed it."""
        self._had_all = error is None and self.transport is not None and not self._num_undelivered()
        self.is_lost = True
        self._admission.forget(self)
        if self._when_lost is not None:
            self._when_lost()


class Admission:
    """Accepts connections on a listening socket for a uvicorn server, in place of an asyncio
    server; see the module."""

    def __init__(
        self,
        listener: socket.socket,
        config: uvicorn.Config,
        state: ServerState,
        tls: ssl.SSLContext | None,
        limits: AdmissionLimits,
    ) -> None:
        self._listener = listener
        self._config = config
        self._state = state
        self._tls = tls
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._silent: dict[AdmittedConnection, None] = {}
        """Strangers that have not sent a byte, the oldest first."""
        self._strangers: dict[AdmittedConnection, None] = {}
        """Strangers that have sent a byte, or have their answer, in this order."""
        self._clients: set[AdmittedConnection] = set()
        self._check_timer: asyncio.TimerHandle | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()
        self._cut_expired()

    def admit(self, connection: AdmittedConnection) -> bool:
        if len(self._clients) >= self._limits.clients:
            return False
        if connection in self._strangers:
            del self._strangers[connection]
            self._clients.add(connection)
        return True

    def leave(self, connection: AdmittedConnection) -> None:
        if connection in self._clients:
            self._clients.discard(connection)
            connection.until = self._loop.time() + self._limits.idle_s
            self._strangers[connection] = None

    def forget(self, connection: AdmittedConnection) -> None:
        self._clients.discard(connection)
        self._strangers.pop(connection, None)
        self._silent.pop(connection, None)

    def close(self) -> None:
        """Stops accepting and cuts strangers off. Clients stay connected."""
        for timer in (self._check_timer, self._pause_timer):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._listener)
        for connection in [*self._silent, *self._strangers]:
            self._cut(connection)

    async def wait_closed(self) -> None:
        """Does nothing. uvicorn calls this method on its servers."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause_timer = self._loop.call_later(seconds, self._listen)

    def _cut_expired(self) -> None:
        now = self._loop.time()
        for connection in [*self._silent, *self._strangers]:
            if now >= connection.until:
                self._cut(connection)
        self._check_timer = self._loop.call_later(POLL_INTERVAL_S, self._cut_expired)

    def _accept(self) -> None:
        started_at = time.perf_counter()
        took_places = False
        until = self._loop.time() + ADMISSION_S
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _NO_HANDLE_ERRORS:
                    raise
                self._make_room()
                self._pause(NO_HANDLE_PAUSE_S)
                return

            if len(self._silent) + len(self._strangers) >= self._limits.strangers:
                self._make_room()
                took_places = True

            accepted.setblocking(False)
            connection = AdmittedConnection(self, accepted, until)
            self._silent[connection] = None
            self._loop.add_reader(accepted, self._begin, connection, accepted)

        if took_places:
            self._pause((time.perf_counter() - started_at) * (1 / ACCEPTING_SHARE - 1))

    def _make_room(self) -> None:
        oldest = next(iter(self._silent or self._strangers), None)
        if oldest is not None:
            self._cut(oldest)

    def _cut(self, connection: AdmittedConnection) -> None:
        self.forget(connection)
        if connection.socket is not None:
            self._loop.remove_reader(connection.socket)
            connection.socket.close()

        if connection.opening is not None:
            connection.opening.cancel()
        if connection.transport is not None:
            connection.transport.abort()

    def _begin(self, connection: AdmittedConnection, accepted: socket.socket) -> None:
        """Handles a connection that has sent something or has ended."""
        try:
            is_gone = not accepted.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_gone = True

        if is_gone:
            self._cut(connection)
            return

        self._loop.remove_reader(accepted)
        del self._silent[connection]
        self._strangers[connection] = None
        connection.opening = self._loop.create_task(self._open(connection, accepted))

    async def _open(self, connection: AdmittedConnection, accepted: socket.socket) -> None:
        times: dict[str, Any] = (
            {}
            if self._tls is None
            else {"ssl_handshake_timeout": ADMISSION_S, "ssl_shutdown_timeout": SHUTDOWN_S}
        )
        connection.socket = None
        try:
            await self._loop.connect_accepted_socket(
                lambda: _HttpProtocol(
                    config=self._config,
                    server_state=self._state,
                    app_state={"connection": connection},
                ),
                accepted,
                ssl=self._tls,
                **times,
            )
        except OSError:  # no TLS, or the connection ended
            self.forget(connection)
        finally:
            connection.opening = None
            if connection.transport is None:
                accepted.close()


class _ClosableTransport:
    """A transport that ignores calls after its close. asyncio's TLS transport forgets its protocol
    when it is closed twice, and then raises AttributeError."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HttpProtocol(H11Protocol):
    """Reports the state of the transport to its connection. Data that is not HTTP gets an error
    answer, unless another answer is being sent. It always ends the connection, without a line in
    the log."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection = self.app_state["connection"]
        connection.transport = transport
        connection.protocol = self
        super().connection_made(_ClosableTransport(transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self.app_state["connection"].lost(exc)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.abort()
            return

        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the last answer is still being sent
            self.transport.abort()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Reports the loss of a WebSocket to its connection. Sends no error answer on a closed
    WebSocket, as at the end of the server: uvicorn would raise AssertionError."""

    def send_500_response(self) -> None:
        if not self.conn.eof_sent:
            super().send_500_response()

    def connection_lost(self, exc: Exception | None) -> None:
        self.app_state["connection"].lost()
        super().connection_lost(exc)
