"""A sandbox on another machine: the client of `agentevo sandbox --serve`.

The sandbox ends with its connection, and with this process. If the server dies, hangs or sends
invalid data, the call reports a failure (`SandboxDied`, `Timeout`). The files are then lost, and
the next call opens another sandbox, or raises SandboxError if it can't. If the code calls tools of
the client, the calls arrive over the same connection and run in this process.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentevo.environments.sandbox import wire
from agentevo.environments.sandbox.exporting import export_files
from agentevo.environments.sandbox.inside.frames import LARGEST_CALL
from agentevo.environments.sandbox.replies import (
    SandboxEnded,
    code_problem,
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


class RemoteSandbox:
    """A sandbox on a server; see Sandbox."""

    def __init__(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> None:
        self._section = section
        self._tools = dict(tools)
        self._lock = asyncio.Lock()
        self._connection: ClientConnection | None = None
        self._ids = itertools.count(1)
        self._is_closed = False

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
            self._end()
            raise SandboxError(f"{section.url}: no sandbox within {limit:g} s") from error
        except SandboxEnded as ended:
            raise SandboxError(f"{section.url}: {ended}") from ended
        except BaseException:
            self._end()
            raise

        if isinstance(answer, wire.Opened):
            return

        self._end()
        reason = (
            answer.message if isinstance(answer, wire.Refused) else "it speaks another protocol"
        )
        raise SandboxError(f"{section.url}: {storable(reason)}")

    async def run(self, code: str, deadline_s: float | None = None) -> Execution:
        """See Sandbox.run."""
        limit = self._deadline(deadline_s)
        if (refusal := code_problem(code)) is not None:
            return Execution("", "", None, refusal, (), 0.0, is_alive=True, is_new=False)

        async with self._lock:
            is_new = await self._ensure_open()
            started_at = time.monotonic()
            try:
                request = wire.Run(next(self._ids), code, limit)
                execution = await self._request(request, Execution, limit)
            except SandboxEnded as ended:
                return Execution(
                    stdout="",
                    stderr="",
                    value=None,
                    error=ended.failure,
                    files=(),
                    duration_s=time.monotonic() - started_at,
                    is_alive=False,
                    is_new=is_new,
                    files_lost=True,
                )

        return msgspec.structs.replace(execution, is_new=execution.is_new or is_new)

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float | None = None
    ) -> ProgramRun:
        """See Sandbox.execute. Raises SandboxError."""
        limit = self._deadline(deadline_s)
        self._check_size("stdin", stdin)
        async with self._lock:
            await self._ensure_open()
            started_at = time.monotonic()
            request = wire.Execute(next(self._ids), tuple(argv), stdin, limit)
            try:
                return await self._request(request, ProgramRun, limit)
            except SandboxEnded as ended:
                duration_s = time.monotonic() - started_at
                return ProgramRun(
                    stdout="",
                    stderr="",
                    exit_code=None,
                    error=ended.failure,
                    files=(),
                    duration_s=duration_s,
                    files_lost=True,
                    server_lost=True,
                )

    async def files(self) -> dict[str, int]:
        """See Sandbox.files. Raises SandboxError."""
        return await self._file_request(wire.Files(next(self._ids)), dict[str, int])

    async def read_file(self, path: str) -> bytes:
        """See Sandbox.read_file. Raises SandboxError."""
        text = await self._file_request(wire.Read(next(self._ids), path), str)
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise SandboxError(f"{path}: the server's reply is not a file") from error

    async def write_file(self, path: str, content: bytes) -> None:
        """See Sandbox.write_file. Raises SandboxError."""
        self._check_size(path, content)
        await self._file_request(wire.Write(next(self._ids), path, content), type(None))

    async def export(self, folder: Path) -> tuple[str, ...]:
        """See Sandbox.export. Raises SandboxError, and OSError if the folder can't be written."""
        return await export_files(
            self, folder, self._section.disk_mib, lambda: self._connection is None
        )

    async def close(self) -> None:
        """See Sandbox.close."""
        self._is_closed = True
        connection = self._connection
        self._connection = None

        if connection is not None:
            try:
                async with asyncio.timeout(2 * CLOSE_S):
                    await connection.close()
            except TimeoutError:
                connection.transport.abort()

    def _deadline(self, deadline_s: float | None) -> float:
        limit = self._section.timeout_s if deadline_s is None else deadline_s
        if not 0 < limit < 1e6:
            raise SandboxError(f"a deadline of {limit} s: give seconds above 0 and below a million")
        return limit

    def _check_size(self, name: str, content: bytes) -> None:
        if len(content) > self._section.file_mib * 2**20:
            raise SandboxError(f"{name}: more than file_mib, {self._section.file_mib} MiB")

    async def _ensure_open(self) -> bool:
        """Opens another sandbox if the last one has ended. Returns whether it opened one."""
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        if self._connection is not None:
            return False

        await self.start()
        if self._is_closed:  # `close` ran while the sandbox was opening
            self._end()
            raise SandboxError("the sandbox is closed")

        return True

    async def _file_request(self, request: wire.Request, kind: type[_T]) -> _T:
        async with self._lock:
            await self._ensure_open()
            try:
                return await self._request(request, kind, FILE_S)
            except SandboxEnded as ended:
                raise SandboxError(f"the sandbox has ended: {ended.failure.message}") from ended

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
            self._end()
            failure = Failure("Timeout", f"the server did not answer within {limit_s:g} s")
            raise SandboxEnded(failure) from None
        except msgspec.ValidationError as error:
            self._end()
            raise violation(f"a reply of another form ({error})") from error
        except SandboxError:
            raise  # nothing was sent
        except BaseException:
            self._end()
            raise

        raise SandboxError(storable(reply.message))

    async def _reply_to(self, request_id: int) -> wire.Done | wire.Failed:
        tool_call: asyncio.Task[None] | None = None
        try:
            while True:
                message = await self._receive()
                if isinstance(message, (wire.Done, wire.Failed)) and message.id == request_id:
                    return message
                if not isinstance(message, wire.Call):
                    raise violation("a reply to no request")
                if tool_call is not None and not tool_call.done():
                    tool_call.cancel()  # the code no longer waits for this call

                tool_call = asyncio.create_task(self._answer(message))
        finally:
            if tool_call is not None:
                tool_call.cancel()
                await asyncio.wait([tool_call], timeout=1.0)

    async def _answer(self, call: wire.Call) -> None:
        tool = self._tools.get(call.name)
        error = ""
        try:
            if tool is None:
                raise SandboxError(f"there is no tool {storable(call.name, 100)!r}")
            answer = wire.Answer(call.number, await tool.call(call.arguments))
            if len(wire.to_json(answer)) > LARGEST_CALL:
                error = f"{call.name}: the result has more than {LARGEST_CALL:,} bytes"
        except AgentEvoError as problem:
            error = storable(str(problem))
        except Exception as problem:  # noqa: BLE001 (a tool's author may raise anything)
            error = f"{storable(call.name, 100)} has failed: {type(problem).__name__}"

        if error:
            answer = wire.Answer(call.number, error=error)

        with contextlib.suppress(SandboxEnded):  # the receiver reports the end
            await self._send(answer)

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
            self._end()
            raise violation("a message that is no reply") from error

    def _connection_lost(self, error: Exception) -> SandboxEnded:
        self._end()
        message = f"the connection to {self._section.url} ended ({describe_error(error)})"
        return SandboxEnded(Failure("SandboxDied", storable(message, 500)))

    def _end(self) -> None:
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
