"""A sandbox on another machine: the client of `agentevo sandbox --serve`.

The sandbox ends with its connection, and with this process. If the server dies, hangs or sends
invalid data, the call reports a failure (`SandboxDied`, `Timeout`). The files are then lost, and
the next call opens another sandbox, or raises SandboxError if it can't. If the code calls tools of
the client, the calls arrive over the same connection and run in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentevo.environments.sandbox import wire
from agentevo.environments.sandbox.client import (
    SandboxClient,
    SandboxEnded,
    longest_message,
    violation,
)
from agentevo.environments.sandbox.sandbox import (
    Execution,
    Failure,
    ProgramRun,
    Sandbox,
    SandboxTool,
    sandboxes,
)
from agentevo.errors import AgentEvoError, SandboxError, describe_error, storable
from agentevo.runtime.credentials import with_environment
from agentevo.runtime.http_clients import is_loopback
from agentevo.runtime.trace_header import trace_headers

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from agentevo.environments.sandbox.section import SandboxSection

MARGIN_S = 15.0
"""The time in seconds that the client waits for the server after the deadline of a call. The server
itself needs up to six seconds."""
FILE_S = 60.0
CLOSE_S = 1.0
_FORBIDDEN = 403
_T = TypeVar("_T")
_FILE_REQUESTS: dict[str, Any] = {"files": wire.Files, "read": wire.Read, "write": wire.Write}


@sandboxes.register("remote")
class Remote:
    """Sandboxes of `agentevo sandbox --serve` at `url`."""

    async def problem(self, section: SandboxSection) -> str:
        """See SandboxKind.problem. Opens a sandbox and tries it."""
        try:
            sandbox = await self.open(section, {})
        except SandboxError as error:
            return str(error)

        try:
            trial = await sandbox.run("6 * 7", deadline_s=min(10.0, section.timeout_s))
        finally:
            await sandbox.close()

        return "" if trial.value == "42" else f"a trial at {section.url} failed: {trial.error}"

    async def open(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> Sandbox:
        """Raises SandboxError."""
        sandbox = RemoteSandbox(section, tools)
        await sandbox.start()
        return sandbox


class RemoteSandbox(SandboxClient):
    """A sandbox on a server."""

    server_lost = True

    def __init__(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> None:
        super().__init__(section, tools)
        self._connection: ClientConnection | None = None
        self._ids = itertools.count(1)

    async def start(self) -> None:
        """Raises SandboxError."""
        section = self._section
        self._connection = await _connect(section)
        options = section.model_dump(mode="json", include=set(wire.REQUESTED))
        tools = [
            wire.ToolForm(tool.name, tool.parameters, tool.description)
            for tool in self._tools.values()
        ]
        opening = wire.Open(options, tuple(tools), section.wait_timeout_s)
        limit = section.wait_timeout_s + section.start_timeout_s + MARGIN_S
        try:
            async with asyncio.timeout(limit):
                await self._send(opening)
                answer = await self._receive()
        except TimeoutError as error:
            self._abort()
            raise SandboxError(f"{section.url}: no sandbox within {limit:g} s") from error
        except SandboxEnded as ended:
            raise SandboxError(f"{section.url}: {ended}") from ended
        except BaseException:
            self._abort()
            raise

        if isinstance(answer, wire.Opened):
            return

        self._abort()
        reason = (
            answer.message if isinstance(answer, wire.Refused) else "it speaks another protocol"
        )
        raise SandboxError(f"{section.url}: {storable(reason)}")

    async def _run(self, code: str, limit_s: float) -> Execution:
        return await self._request(wire.Run(next(self._ids), code, limit_s), Execution, limit_s)

    async def _execute(self, argv: Sequence[str], stdin: bytes, limit_s: float) -> ProgramRun:
        request = wire.Execute(next(self._ids), tuple(argv), stdin, limit_s)
        return await self._request(request, ProgramRun, limit_s)

    async def _file_request(self, do: str, kind: type[_T], **fields: Any) -> _T:
        return await self._request(_FILE_REQUESTS[do](next(self._ids), **fields), kind, FILE_S)

    async def close(self) -> None:
        self._is_closed = True
        connection = self._connection
        self._connection = None

        if connection is not None:
            try:
                async with asyncio.timeout(2 * CLOSE_S):
                    await connection.close()
            except TimeoutError:
                connection.transport.abort()

    async def _is_running(self) -> bool:
        return self._connection is not None

    async def _end(self) -> None:
        self._abort()

    async def _request(self, request: wire.Request, kind: type[_T], limit_s: float) -> _T:
        """Sends one request and returns its reply. Raises SandboxError if the server refuses the
        request, and SandboxEnded if the sandbox has ended."""
        try:
            async with asyncio.timeout(limit_s + MARGIN_S):
                await self._send(request)
                reply = await self._reply_to(request.id)
            if isinstance(reply, wire.Done):
                return msgspec.convert(reply.value, kind)
        except TimeoutError:
            self._abort()
            failure = Failure("Timeout", f"the server did not answer within {limit_s:g} s")
            raise SandboxEnded(failure) from None
        except msgspec.ValidationError as error:
            self._abort()
            raise violation(f"a reply of another form ({error})") from error
        except SandboxError:
            raise  # nothing was sent
        except BaseException:
            self._abort()
            raise

        raise SandboxError(storable(reply.message))

    async def _reply_to(self, request_id: int) -> wire.Done | wire.Failed:
        message = await self._reply(self._receive, lambda reply: isinstance(reply, wire.Call))
        if not isinstance(message, (wire.Done, wire.Failed)) or message.id != request_id:
            raise violation("a reply to no request")
        return message

    async def _send_answer(self, call: wire.Call) -> None:
        result, error = await self._call_tool(call.name, call.arguments)
        with contextlib.suppress(SandboxEnded):  # the receiver reports the end
            await self._send(wire.Answer(call.number, result, error))

    async def _send(self, message: wire.FromClient) -> None:
        """Raises SandboxEnded."""
        from websockets.exceptions import ConnectionClosed

        if self._connection is None:
            raise SandboxEnded(Failure("SandboxDied", "the connection has ended"))

        try:
            content = wire.to_json(message)
        except UnicodeEncodeError as error:
            raise SandboxError("a text has half of a surrogate pair: give Unicode") from error

        try:
            await self._connection.send(content)
        except (ConnectionClosed, OSError) as error:
            raise self._connection_lost(error) from error

    async def _receive(self) -> wire.FromServer:
        """Raises SandboxEnded."""
        from websockets.exceptions import ConnectionClosed

        if self._connection is None:
            raise SandboxEnded(Failure("SandboxDied", "the connection has ended"))

        try:
            return wire.read_answer(await self._connection.recv())
        except (ConnectionClosed, OSError) as error:
            raise self._connection_lost(error) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._abort()
            raise violation("a message that is no reply") from error

    def _connection_lost(self, error: Exception) -> SandboxEnded:
        self._abort()
        message = f"the connection to {self._section.url} ended ({describe_error(error)})"
        return SandboxEnded(Failure("SandboxDied", storable(message, 500)))

    def _abort(self) -> None:
        """Closes the connection immediately, without a message to the server."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.transport.abort()


async def _connect(section: SandboxSection) -> ClientConnection:
    """Raises SandboxError."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, WebSocketException

    class Connect(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc  # a redirect must not send the key to another server

    url = str(section.url).rstrip("/")
    options: dict[str, Any] = {"proxy": None} if is_loopback(url) else {}
    try:
        return await Connect(
            f"ws{url.removeprefix('http')}{wire.PATH}",
            additional_headers={**authorization(section), **trace_headers()},
            compression=None,
            open_timeout=section.start_timeout_s,
            close_timeout=CLOSE_S,
            ping_interval=wire.PING_S,
            ping_timeout=wire.SILENT_S,
            max_size=longest_message(section),
            **options,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status == _FORBIDDEN:
            raise SandboxError(
                f"{url}: the key is wrong or missing: set api_key: ${{env:NAME}}, and set the "
                "variable to the content of the file `secret` in the server's folder"
            ) from None
        raise SandboxError(f"{url}: no server of sandboxes answers (HTTP {status})") from None
    except (OSError, WebSocketException, ValueError) as error:
        raise SandboxError(
            f"{url} can't be reached ({storable(describe_error(error), 300)}): start `agentevo "
            "sandbox FOLDER --serve` there, or correct the url"
        ) from error


def authorization(section: SandboxSection) -> dict[str, str]:
    """The header with the key, if there is one. Raises SandboxError."""
    if section.api_key is None:
        return {}

    try:
        key = with_environment(section.api_key).strip()
    except AgentEvoError as error:
        raise SandboxError(f"sandbox.api_key: {error}") from error

    if not key.isascii() or not key.isprintable():
        raise SandboxError(
            "sandbox.api_key: the key has characters that are not allowed in a header"
        )

    return {"Authorization": f"Bearer {key}"}
