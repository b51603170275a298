"""`agentevo sandbox --serve`: sandboxes of this machine for clients on others.

A WebSocket is a sandbox (environments/sandbox/wire.py; environments/sandbox/remote.py is the
client): it ends with the connection, so that a client which is killed, or cut off from the network,
leaves nothing running for longer than SILENT_S. A client without the key of the server's folder is
refused before anything is read, and cut off within seconds (inference/serving/admission.py).
Clients choose limits up to the server's own, and can't choose the isolation. A message outside the
protocol ends its sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pydantic
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentevo.environments.sandbox import Sandbox, SandboxTool, sandboxes, wire
from agentevo.environments.sandbox.client import longest_message
from agentevo.environments.sandbox.open_sandbox import chosen_kind
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import AgentEvoError, ConfigError, SandboxError, describe_error, storable
from agentevo.inference.serving.admission import (
    AdmissionLimits,
    AdmittedConnection,
    WebSocketProtocol,
)
from agentevo.inference.serving.http_server import serving, url_of
from agentevo.inference.serving.secret import RunSecret
from agentevo.runs.processes.endpoint import open_endpoint
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals

LOG = logging.getLogger(__name__)

MAX_STRANGERS = 128
OPEN_S = 15.0
"""The time limit of the first message, in seconds."""
SEND_S = 60.0
"""The time limit of a client to read a message, in seconds."""
LONGEST_WAIT_S = 3600.0
MAX_WAITING = 16
"""The limit of one client's waiting messages."""
GRACE_S = 10.0
"""The time limit of the sandboxes' end at the end of the server."""
UNSUPPORTED = 1003
"""Close code, RFC 6455."""
POLICY = 1008
"""Likewise."""
TRY_AGAIN_LATER = 1013
"""Likewise."""
_NUMBERS = tuple(name for name in wire.REQUESTED if name not in ("env", "packages"))


class ProtocolBreach(Exception):
    """A client sent a message outside the protocol."""


class SandboxServer:
    """The application. `section`: the isolation, and the largest limits that a client may
    choose."""

    def __init__(
        self, section: SandboxSection, kind: str, secret: RunSecret, *, idle_s: float
    ) -> None:
        self.section = section
        self.kind = kind
        self.idle_s = idle_s
        self.free = asyncio.Semaphore(section.max_sandboxes)
        self._secret = secret
        self._closed = asyncio.Event()
        self._sessions: set[asyncio.Task[Any]] = set()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def close(self) -> None:
        """Ends all sandboxes."""
        self._closed.set()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=GRACE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: AdmittedConnection = scope["state"]["connection"]
        is_known = self._secret.matches_header(Headers(scope=scope).get("authorization"))
        try:
            if scope["type"] != "websocket":
                status = 426 if is_known else 401
                answer = PlainTextResponse(
                    f"a server of sandboxes: connect by WebSocket to {wire.PATH}, with the key\n",
                    status,
                    {"Connection": "close"},
                )
                await answer(scope, receive, send)
                return

            websocket = WebSocket(scope, receive, send)
            if not is_known or scope["path"] != wire.PATH:
                await websocket.close()
                return

            if not connection.admit():
                await websocket.accept()
                await websocket.close(TRY_AGAIN_LATER, "the server has too many clients")
                return

            serving = asyncio.ensure_future(_SandboxSession(self, websocket).serve(self._closed))
            self._sessions.add(serving)
            try:
                await serving
            finally:
                self._sessions.discard(serving)
        finally:
            connection.leave()

    def section_for(self, overrides: dict[str, Any]) -> SandboxSection:
        """The settings of a client's sandbox. Raises SandboxError for more than the server
        allows."""
        limits = self.section.model_dump()
        unknown = sorted(overrides.keys() - set(wire.REQUESTED))
        if unknown:
            raise SandboxError(f"{unknown[0][:60]!r} is not a key that a client may set")

        try:
            section = SandboxSection.model_validate({**limits, **overrides, "type": self.kind})
        except pydantic.ValidationError as error:
            raise SandboxError(f"sandbox: {error.errors()[0]['msg']}") from None

        for name in _NUMBERS:
            if getattr(section, name) > limits[name]:
                raise SandboxError(
                    f"sandbox.{name} is {getattr(section, name):g}, and the server allows "
                    f"{limits[name]:g}: lower it, or start the server with {name}=..."
                )

        if section.packages and not self.section.packages:
            raise SandboxError(
                "sandbox.packages is true: leave it out, or start the server with packages=true"
            )

        return section


class _SandboxSession:
    """One client's sandbox."""

    def __init__(self, server: SandboxServer, websocket: WebSocket) -> None:
        self._server = server
        self._websocket = websocket
        self._requests: asyncio.Queue[wire.Open | wire.Request] = asyncio.Queue(MAX_WAITING)
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {}
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()

    async def serve(self, closed: asyncio.Event) -> None:
        """Runs until the client leaves, is idle for too long, or the server ends."""
        await self._websocket.accept()
        duties = [
            asyncio.ensure_future(duty) for duty in (self._read(), self._work(), closed.wait())
        ]
        try:
            done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)

        error = next((task.exception() for task in done if task.exception() is not None), None)
        if error is not None and not isinstance(error, (ProtocolBreach, WebSocketDisconnect)):
            LOG.error("a session of sandboxes has failed: %s", describe_error(error))

        code = POLICY if isinstance(error, ProtocolBreach) else 1011 if error is not None else 1001
        reason = str(error) if isinstance(error, ProtocolBreach) else ""
        with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._websocket.close(code, reason.encode("ascii", "replace")[:120].decode())

    async def _read(self) -> None:
        """Returns when the client has left. Raises Violation."""
        while (event := await self._websocket.receive())["type"] == "websocket.receive":
            content = event.get("bytes") or (event.get("text") or "").encode()
            try:
                message = wire.read_request(content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolBreach(f"not a client message: {error}") from error

            if isinstance(message, wire.Answer):
                waiting = self._calls.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                continue

            try:
                self._requests.put_nowait(message)
            except asyncio.QueueFull:
                raise ProtocolBreach(f"more than {MAX_WAITING} requests at once") from None

    async def _work(self) -> None:
        """Returns after a refusal, and when the client was idle for too long. Raises Violation."""
        try:
            async with asyncio.timeout(OPEN_S):
                first = await self._requests.get()
        except TimeoutError:
            raise ProtocolBreach(f"no sandbox was requested within {OPEN_S:g} s") from None

        if not isinstance(first, wire.Open):
            raise ProtocolBreach("a request before a sandbox was requested")

        server = self._server
        try:
            section = server.section_for(first.section)
            tools = {tool.name: self._tool(tool) for tool in first.tools}
            await self._wait(first.wait_s)
        except SandboxError as error:
            await self._send(wire.Refused(storable(str(error))))
            return

        try:
            await self._serve_sandbox(section, tools)
        finally:
            server.free.release()

    async def _wait(self, wait_s: float) -> None:
        """Waits for a free place. Raises SandboxError."""
        limit = min(max(wait_s, 0.0), LONGEST_WAIT_S)
        try:
            async with asyncio.timeout(limit):
                await self._server.free.acquire()
        except TimeoutError:
            most = self._server.section.max_sandboxes
            raise SandboxError(
                f"the server has {most} sandboxes open, and none was closed within {limit:g} s: "
                "start it with max_sandboxes=..., or raise wait_timeout_s"
            ) from None

    async def _serve_sandbox(self, section: SandboxSection, tools: dict[str, SandboxTool]) -> None:
        try:
            sandbox = await sandboxes.get(self._server.kind)().open(section, tools)
        except SandboxError as error:
            await self._send(wire.Refused(storable(str(error))))
            return

        try:
            await self._send(wire.Opened(self._server.kind))
            while (request := await self._next()) is not None:
                await self._send(await self._done(sandbox, request))
        finally:
            await sandbox.close()

    async def _next(self) -> wire.Open | wire.Request | None:
        """The next request; None if none arrives for too long."""
        try:
            async with asyncio.timeout(self._server.idle_s):
                return await self._requests.get()
        except TimeoutError:
            return None

    async def _done(
        self, sandbox: Sandbox, request: wire.Open | wire.Request
    ) -> wire.Done | wire.Failed:
        """Raises Violation."""
        if isinstance(request, wire.Open):
            raise ProtocolBreach("a second sandbox was requested: each needs its own connection")
        try:
            return wire.Done(request.id, await self._value(sandbox, request))
        except SandboxError as error:
            return wire.Failed(request.id, storable(str(error)))

    async def _value(self, sandbox: Sandbox, request: wire.Request) -> Any:
        if isinstance(request, wire.Files):
            return await sandbox.files()
        if isinstance(request, wire.Read):
            return base64.b64encode(await sandbox.read_file(request.path)).decode()
        if isinstance(request, wire.Write):
            return await sandbox.write_file(request.path, request.content)

        if request.deadline_s > self._server.section.timeout_s:
            raise SandboxError(
                f"a deadline of {request.deadline_s:g} s, and the server allows "
                f"{self._server.section.timeout_s:g} s: lower it, or start the server with "
                "timeout_s=..."
            )

        if isinstance(request, wire.Run):
            return await sandbox.run(request.code, request.deadline_s)

        return await sandbox.execute(
            request.argv, stdin=request.stdin, deadline_s=request.deadline_s
        )

    def _tool(self, form: wire.ToolForm) -> SandboxTool:
        """A function for the sandboxed code that calls the client. Raises SandboxError."""
        if not form.name.isidentifier():
            raise SandboxError(f"the tool {form.name[:60]!r} can't be a function: rename it")

        async def call(arguments: dict[str, Any]) -> Any:
            number = next(self._numbers)
            waiting: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
            self._calls[number] = waiting
            try:
                await self._send(wire.Call(number, form.name, arguments))
                answer = await waiting  # until the deadline of the calling code
            finally:
                del self._calls[number]

            if answer.error is not None:
                raise SandboxError(answer.error)

            return answer.result

        return SandboxTool(form.name, form.parameters, form.description, call)

    async def _send(self, message: wire.FromServer) -> None:
        """Raises Violation if the client does not read it."""
        try:
            async with asyncio.timeout(SEND_S), self._sending:
                await self._websocket.send_bytes(wire.to_json(message))
        except TimeoutError:
            raise ProtocolBreach(f"the client read nothing for {SEND_S:g} s") from None
        except RuntimeError as error:  # the client has left
            raise WebSocketDisconnect from error


def serve_sandboxes(
    folder: Path,
    section: SandboxSection,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    idle_s: float = 3600.0,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Serves until the process is asked to stop; blocks. `folder` holds the key, which is made if
    there is none. Raises ConfigError before anything is created, also where no sandbox works."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give another one for the server's key")

    with (
        catch_stop_signals() as stop,
        open_endpoint(
            folder.absolute().parent, host, port, tls, folder.absolute().name
        ) as endpoint,
    ):
        try:
            kind = run_coroutine(chosen_kind(section))
        except SandboxError as error:
            raise ConfigError(str(error)) from error

        try:
            endpoint.secret.value()
            context = endpoint.server_context()
        except (AgentEvoError, OSError) as error:
            raise ConfigError(f"{folder}: {error}") from error

        async def serve() -> None:
            server = SandboxServer(section, kind, endpoint.secret, idle_s=idle_s)
            clients = 2 * section.max_sandboxes + 16  # some wait for a place
            async with serving(
                server,
                endpoint.listener,
                close=server.close,
                tls=context,
                limits=AdmissionLimits(strangers=MAX_STRANGERS, clients=clients),
                ws=WebSocketProtocol,
                ws_max_size=longest_message(section),
                ws_ping_interval=wire.PING_S,
                ws_ping_timeout=wire.SILENT_S,
                ws_per_message_deflate=False,
            ):
                url = url_of(endpoint.listener, encrypted=endpoint.encrypts)
                note(f"sandboxes ({kind}) at {url}")
                note(endpoint.where_the_key_is())
                while not stop():
                    await asyncio.sleep(POLL_INTERVAL_S)

        run_coroutine(serve())
