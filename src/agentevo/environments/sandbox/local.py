"""A sandbox in processes of this machine: the host's side of the connection to its supervisor.

The host trusts nothing from inside. It accepts only frames of bounded length, JSON of known types,
and texts of bounded length. Anything else ends the sandbox, and is reported as a failure of the
code. A call that exceeds its deadline and a margin ends the sandbox. A cancelled call ends the
sandbox immediately.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import socket
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentevo.environments.sandbox.cgroups import ControlGroup, new_group
from agentevo.environments.sandbox.exporting import export_files
from agentevo.environments.sandbox.inside.frames import LARGEST_CALL
from agentevo.environments.sandbox.launch import SandboxLaunch
from agentevo.environments.sandbox.replies import (
    ProgramReply,
    RunReply,
    SandboxEnded,
    code_problem,
    is_unicode,
    longest_message,
    storable_failure,
    violation,
)
from agentevo.environments.sandbox.resource_watch import WatchedSandbox, descendants, watch
from agentevo.environments.sandbox.sandbox import (
    Execution,
    Failure,
    ProgramRun,
    Sandbox,
    SandboxTool,
)
from agentevo.environments.sandbox.termination import end_all_of, end_with_this_process, kill
from agentevo.errors import AgentEvoError, SandboxError, storable
from agentevo.runtime.event_loop import in_thread

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

MARGIN_S = 6.0
"""The seconds after its deadline within which the supervisor must end a call."""
FILE_S = 30.0
"""The time limit in seconds for reading, writing or listing files."""
_HEADER = struct.Struct(">I")
_TRIAL = """
import socket
try:
    socket.socket()
    open_ways = "a network"
except OSError:
    open_ways = "no network"
open_ways
"""


_T = TypeVar("_T")


class LocalKind(ABC):
    """A way to start sandboxes on this machine."""

    name: str

    @abstractmethod
    def obstacle(self) -> str:
        """Why the kind can't be used here, and what to do. Empty if it should work. Can block."""

    @abstractmethod
    def launch(self, section: SandboxSection) -> SandboxLaunch:
        """Can block. Raises SandboxError and OSError."""

    async def open(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> Sandbox:
        """Raises SandboxError."""
        sandbox = LocalSandbox(self, section, tools)
        await sandbox.start()
        return sandbox

    async def problem(self, section: SandboxSection) -> str:
        """See SandboxKind.problem. Starts a sandbox and tries it."""
        try:
            if obstacle := await in_thread(self.obstacle):
                return obstacle
            sandbox = await self.open(section, {})
        except (SandboxError, OSError, subprocess.SubprocessError) as error:
            return str(error)

        try:
            tried = await sandbox.run(_TRIAL, deadline_s=10.0)
        finally:
            await sandbox.close()

        if tried.value == "'no network'" or (self.name == "none" and tried.error is None):
            return ""

        return f"a trial has failed: it has {tried.value}, {tried.error}, {tried.stderr[-300:]}"


class LocalSandbox:
    """See Sandbox, and the module."""

    def __init__(
        self, kind: LocalKind, section: SandboxSection, tools: Mapping[str, SandboxTool]
    ) -> None:
        self._kind = kind
        self._section = section
        self._tools = dict(tools)
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._launch: SandboxLaunch | None = None
        self._failure: Failure | None = None
        self._num_requests = 0
        self._num_calls = 0
        self._has_lost = False
        self._is_closed = False
        self._longest = longest_message(section)

    async def start(self) -> None:
        """Raises SandboxError."""
        spawning = asyncio.ensure_future(in_thread(self._spawn))
        try:
            async with asyncio.timeout(self._section.start_timeout_s):
                process, launch, own_socket = await asyncio.shield(spawning)
                self._process = process
                self._launch = launch
                self._failure = None
                self._reader, self._writer = await asyncio.open_unix_connection(sock=own_socket)
                self._write(dict(launch.settings))
                await self._read()

                if launch.group is not None:
                    await in_thread(_move, process.pid, launch.group)
        except TimeoutError as error:
            await self._abandon(spawning)
            limit = self._section.start_timeout_s
            raise SandboxError(f"{self._kind.name}: not started within {limit:g} s") from error
        except SandboxEnded as ended:
            reason = await self._last_line()
            await self._abandon(spawning)
            raise SandboxError(
                f"{self._kind.name}: it can't be started: {reason or ended}"
            ) from ended
        except BaseException:
            await self._abandon(spawning)
            raise

        self._watch(process, launch)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], SandboxLaunch, socket.socket]:
        try:
            launch = self._kind.launch(self._section)
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{self._kind.name}: it can't be started: {error}") from error

        own_socket, child_socket = socket.socketpair()
        try:
            launch = replace(launch, group=new_group(self._section))
            process = subprocess.Popen(
                launch.argv,
                stdin=child_socket.fileno(),
                stdout=child_socket.fileno(),
                stderr=subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=launch.pass_fds,
                start_new_session=True,
                user=launch.uid,
                group=launch.uid,
                extra_groups=None if launch.uid is None else [],
            )
        except (OSError, subprocess.SubprocessError, SandboxError) as error:
            own_socket.close()
            if launch.group is not None:
                launch.group.end(time.monotonic())
            launch.clean()
            raise SandboxError(f"{self._kind.name}: it can't be started: {error}") from error
        finally:
            child_socket.close()
            for handle in launch.pass_fds:
                os.close(handle)

        end_with_this_process(process, launch)
        own_socket.setblocking(False)
        return process, launch, own_socket

    def _watch(self, process: subprocess.Popen[bytes], launch: SandboxLaunch) -> None:
        def end(kind: str, message: str) -> None:
            if self._process is process and self._failure is None:
                self._failure = Failure(kind, f"the sandbox was ended: it had {message}")
                kill(process, launch)

        section = self._section
        watched = WatchedSandbox(
            process.pid,
            section.memory_mib,
            section.processes,
            section.disk_mib,
            section.max_files,
            launch.folder,
            launch.work,
            end,
        )
        watch.add(watched)

    async def _abandon(self, spawning: asyncio.Future[Any]) -> None:
        """Ends the sandbox that was starting, even if its thread still runs."""

        def end(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                process, launch, own_socket = done.result()
                own_socket.close()
                threading.Thread(target=end_all_of, args=(process, launch)).start()

        if self._process is None:
            spawning.add_done_callback(end)

        await self._end()

    async def _last_line(self) -> str:
        """The last line that the wrapper or the supervisor wrote."""
        process = self._process
        if process is None or process.stderr is None:
            return ""
        stream = process.stderr
        os.set_blocking(stream.fileno(), False)
        text = (stream.read(2**16) or b"").decode("utf-8", "replace").strip()
        return (text.splitlines() or [""])[-1][:500]

    async def run(self, code: str, deadline_s: float | None = None) -> Execution:
        """See Sandbox.run."""
        limit = self._deadline(deadline_s)
        if (refusal := code_problem(code)) is not None:
            return Execution("", "", None, refusal, (), 0.0, is_alive=True, is_new=False)

        tools = [
            {"name": tool.name, "parameters": tool.parameters, "description": tool.description}
            for tool in self._tools.values()
        ]
        async with self._lock:
            before = time.monotonic()
            is_new = await self._ensure()
            started_at = time.monotonic()
            self._num_calls = 0

            try:
                answer = await self._ask("run", limit, code=code, deadline_s=limit, tools=tools)
                reply = await self._convert(answer, RunReply)
            except SandboxEnded as ended:
                return Execution(
                    stdout="",
                    stderr="",
                    value=None,
                    error=ended.failure,
                    files=(),
                    duration_s=time.monotonic() - before,
                    is_alive=False,
                    is_new=is_new,
                    files_lost=True,
                )

        return Execution(
            self._bounded(reply.stdout),
            self._bounded(reply.stderr),
            None if reply.value is None else self._bounded(reply.value),
            storable_failure(reply.error),
            tuple(storable(path, 1100) for path in reply.files),
            time.monotonic() - started_at,
            is_alive=reply.is_alive,
            is_new=is_new or reply.is_new,
        )

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float | None = None
    ) -> ProgramRun:
        """See Sandbox.execute. Raises SandboxError."""
        limit = self._deadline(deadline_s)
        if not argv or any("\0" in word or not is_unicode(word) for word in argv):
            raise SandboxError("execute takes a command as a list of strings without NUL")
        if len(stdin) > self._section.file_mib * 2**20:
            raise SandboxError(f"stdin has more than file_mib, {self._section.file_mib} MiB")

        async with self._lock:
            await self._ensure()
            self._has_lost = False

            started_at = time.monotonic()
            text = base64.b64encode(stdin).decode()
            try:
                answer = await self._ask(
                    "execute", limit, argv=list(argv), stdin=text, deadline_s=limit
                )
                reply = await self._convert(answer, ProgramReply)
            except SandboxEnded as ended:
                duration_s = time.monotonic() - started_at
                return ProgramRun("", "", None, ended.failure, (), duration_s, files_lost=True)

        return ProgramRun(
            self._bounded(reply.stdout),
            self._bounded(reply.stderr),
            reply.exit_code,
            storable_failure(reply.error),
            tuple(storable(path, 1100) for path in reply.files),
            time.monotonic() - started_at,
        )

    async def files(self) -> dict[str, int]:
        """See Sandbox.files. Raises SandboxError."""
        return await self._file_request("files", "files", dict[str, int])

    async def read_file(self, path: str) -> bytes:
        """See Sandbox.read_file. Raises SandboxError."""
        text = await self._file_request("read", "content", str, path=path)
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise SandboxError(f"{path}: the sandbox's reply is not a file") from error

    async def write_file(self, path: str, content: bytes) -> None:
        """See Sandbox.write_file. Raises SandboxError."""
        if len(content) > self._section.file_mib * 2**20:
            raise SandboxError(f"{path}: more than file_mib, {self._section.file_mib} MiB")
        text = base64.b64encode(content).decode()
        await self._file_request("write", "", type(None), path=path, content=text)

    async def export(self, folder: Path) -> tuple[str, ...]:
        """See Sandbox.export. Raises SandboxError, and OSError where it can't be written."""
        return await export_files(
            self, folder, self._section.disk_mib, lambda: self._process is None
        )

    async def close(self) -> None:
        """See Sandbox.close."""
        self._is_closed = True
        await self._end()

    def _deadline(self, deadline_s: float | None) -> float:
        limit = self._section.timeout_s if deadline_s is None else deadline_s
        if not 0 < limit < 1e6:
            raise SandboxError(f"a deadline of {limit} s: give seconds above 0 and below a million")
        return limit

    def _bounded(self, text: str) -> str:
        """Bounds a text. Head and tail were cut inside; a longer text does not come from the
        supervisor."""
        return storable(text, 2 * self._section.output_kib * 1024 + 200)

    async def _ensure(self) -> bool:
        """Starts another sandbox if the last one has ended. Returns whether it did."""
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        if self._process is not None and self._process.poll() is not None:
            await self._end()

        is_new = self._process is None
        if is_new:
            await self.start()

        if self._is_closed:  # it was closed while it was started
            await self._end()
            raise SandboxError("the sandbox is closed")

        return is_new

    async def _file_request(self, do: str, key: str, kind: type[_T], **fields: Any) -> _T:
        if not is_unicode(fields.get("path", "")):
            raise SandboxError(
                f"the path {fields['path'][:200]!r} is not valid Unicode: give another name"
            )

        async with self._lock:
            await self._ensure()
            try:
                reply = await self._ask(do, FILE_S, **fields)
                if "refused" in reply:
                    raise SandboxError(storable(str(reply["refused"])))
                return await self._convert(reply.get(key), kind)
            except SandboxEnded as ended:
                raise SandboxError(f"the sandbox has ended: {ended.failure.message}") from ended

    async def _ask(self, do: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Sends one request and returns its reply. Raises SandboxEnded, after it has ended
        everything."""
        self._num_requests += 1
        number = self._num_requests
        try:
            async with asyncio.timeout(limit_s + MARGIN_S):
                self._write({"id": number, "do": do, **fields})
                return await self._reply_to(number)
        except TimeoutError:
            failure = Failure("Timeout", f"the sandbox did not answer within {limit_s:g} s")
        except SandboxEnded as ended:
            failure = ended.failure
        except BaseException:
            await self._end()
            raise

        await self._end()
        raise SandboxEnded(failure)

    async def _reply_to(self, number: int) -> dict[str, Any]:
        calling: asyncio.Task[None] | None = None
        try:
            while True:
                message = await self._read()
                if message.get("id") != number:
                    raise violation("a reply to no request")
                if "call" not in message:
                    return message
                if calling is not None and not calling.done():
                    calling.cancel()  # the code no longer waits for it

                calling = asyncio.create_task(self._answer(message))
        finally:
            if calling is not None:
                calling.cancel()
                await asyncio.wait([calling], timeout=1.0)

    async def _answer(self, message: dict[str, Any]) -> None:
        number = message.get("number")
        name = message["call"]
        answer: dict[str, Any]
        try:
            answer = {"result": await self._call(name, message.get("arguments"))}
            if len(msgspec.json.encode(answer)) > LARGEST_CALL:
                answer = {"error": f"{name}: the result has more than {LARGEST_CALL:,} bytes"}
        except AgentEvoError as error:
            answer = {"error": storable(str(error))}
        except Exception as error:  # noqa: BLE001 (a tool's author may raise anything)
            answer = {"error": f"{storable(str(name), 100)} has failed: {type(error).__name__}"}

        if isinstance(number, int):
            self._write({"do": "answer", "number": number, **answer})

    async def _call(self, name: Any, arguments: Any) -> Any:
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None or not isinstance(arguments, dict):
            raise SandboxError(f"there is no tool {storable(str(name), 100)!r}")

        self._num_calls += 1
        if self._num_calls > self._section.max_tool_calls:
            limit = self._section.max_tool_calls
            raise SandboxError(f"more than max_tool_calls={limit} tool calls in one run")

        return await tool.call(arguments)

    def _write(self, message: dict[str, Any]) -> None:
        content = msgspec.json.encode(message)
        with contextlib.suppress(OSError):  # then the reader sees the end
            self._writer.write(_HEADER.pack(len(content)) + content)

    async def _read(self) -> dict[str, Any]:
        """Reads the next frame. Raises SandboxEnded."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if length > self._longest:
                raise violation(f"{length:,} bytes")
            message = msgspec.json.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise SandboxEnded(self._failure or self._describe_death()) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise violation("text that is not JSON") from error

        if not isinstance(message, dict):
            raise violation("JSON that is not an object")

        return message

    def _describe_death(self) -> Failure:
        group = None if self._launch is None else self._launch.group
        if group is not None and group.was_out_of_memory():
            limit = self._section.memory_mib
            message = f"the sandbox was ended: it had more than {limit} MiB of memory, all together"
            return Failure("OutOfMemory", message)
        return Failure("SandboxDied", "the sandbox has ended itself")

    async def _convert(self, value: Any, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            await self._end()
            raise violation(f"a reply of another form ({error})") from error

    async def _end(self) -> None:
        """Ends all processes and deletes the sandbox's files. A cancellation does not interrupt
        this."""
        process = self._process
        launch = self._launch
        self._process = None

        if process is None or launch is None:
            return

        watch.remove(process.pid)
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.close()

        await asyncio.shield(asyncio.ensure_future(in_thread(end_all_of, process, launch)))


def _move(pid: int, group: ControlGroup) -> None:
    """Moves the processes into the group. At this time only AgentEvo's own processes run. Raises
    SandboxError."""
    try:
        group.add([pid, *descendants(pid)])
    except OSError as error:
        raise SandboxError(f"a process can't be put into its cgroup: {error}") from error
