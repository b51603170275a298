"""A sandbox in processes of this machine: the host's side of the connection to its supervisor.

The host trusts nothing from inside. It accepts only frames of bounded length, JSON of known types,
and texts of bounded length. Anything else ends the sandbox, and is reported as a failure of the
code. A call that exceeds its deadline and a margin ends the sandbox. A cancelled call ends the
sandbox immediately.
"""

from __future__ import annotations

import asyncio
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
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentevo.environments.sandbox.cgroups import ControlGroup, new_group
from agentevo.environments.sandbox.client import (
    ProgramReply,
    RunReply,
    SandboxClient,
    SandboxEnded,
    longest_message,
    storable_failure,
    violation,
)
from agentevo.environments.sandbox.launch import (
    INSIDE,
    PREFIX,
    SandboxLaunch,
    python_program,
    supervisor_settings,
)
from agentevo.environments.sandbox.resource_watch import WatchedSandbox, descendants, watch
from agentevo.environments.sandbox.sandbox import (
    Execution,
    Failure,
    ProgramRun,
    Sandbox,
    SandboxTool,
    sandboxes,
)
from agentevo.environments.sandbox.termination import end_all_of, end_with_this_process, kill
from agentevo.errors import SandboxError, storable
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.process_folders import new_folder, remove_folder

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection


MARGIN_S = 6.0
"""The seconds after its deadline within which the supervisor must end a call."""
FILE_S = 30.0
"""The time limit in seconds for reading, writing or listing files."""
_HEADER = struct.Struct(">I")
_REPLY_KEYS = {"files": "files", "read": "content", "write": ""}
"""The key of the value in the reply to each request about files."""
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


class LocalSandbox(SandboxClient):
    """See the module."""

    def __init__(
        self, kind: LocalKind, section: SandboxSection, tools: Mapping[str, SandboxTool]
    ) -> None:
        super().__init__(section, tools)
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._launch: SandboxLaunch | None = None
        self._failure: Failure | None = None
        self._num_requests = 0
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
            section = self._section
            memory_mib = section.memory_mib + section.disk_mib
            group = new_group(memory_mib, section.processes, section.cpus)
            launch = replace(launch, group=group)
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

    async def _run(self, code: str, limit_s: float) -> Execution:
        tools = [
            {"name": tool.name, "parameters": tool.parameters, "description": tool.description}
            for tool in self._tools.values()
        ]
        started_at = time.monotonic()
        answer = await self._ask("run", limit_s, code=code, deadline_s=limit_s, tools=tools)
        reply = await self._convert(answer, RunReply)
        return Execution(
            self._bounded(reply.stdout),
            self._bounded(reply.stderr),
            None if reply.value is None else self._bounded(reply.value),
            storable_failure(reply.error),
            tuple(storable(path, 1100) for path in reply.files),
            time.monotonic() - started_at,
            is_alive=reply.is_alive,
            is_new=reply.is_new,
        )

    async def _execute(self, argv: Sequence[str], stdin: bytes, limit_s: float) -> ProgramRun:
        started_at = time.monotonic()
        answer = await self._ask(
            "execute", limit_s, argv=list(argv), stdin=stdin, deadline_s=limit_s
        )
        reply = await self._convert(answer, ProgramReply)
        return ProgramRun(
            self._bounded(reply.stdout),
            self._bounded(reply.stderr),
            reply.exit_code,
            storable_failure(reply.error),
            tuple(storable(path, 1100) for path in reply.files),
            time.monotonic() - started_at,
        )

    async def _file_request(self, do: str, kind: type[_T], **fields: Any) -> _T:
        reply = await self._ask(do, FILE_S, **fields)
        if "refused" in reply:
            raise SandboxError(storable(str(reply["refused"])))
        return await self._convert(reply.get(_REPLY_KEYS[do]), kind)

    async def close(self) -> None:
        self._is_closed = True
        await self._end()

    def _bounded(self, text: str) -> str:
        """Bounds a text. Head and tail were cut inside; a longer text does not come from the
        supervisor."""
        return storable(text, 2 * self._section.output_kib * 1024 + 200)

    async def _is_running(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            await self._end()
        return self._process is not None

    async def _ask(self, do: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Sends one request and returns its reply. Raises SandboxEnded, after it has ended
        everything."""
        self._num_requests += 1
        number = self._num_requests
        try:
            async with asyncio.timeout(limit_s + MARGIN_S):
                self._write({"id": number, "do": do, **fields})
                return await self._reply(
                    lambda: self._read_for(number), lambda reply: "call" in reply
                )
        except TimeoutError:
            failure = Failure("Timeout", f"the sandbox did not answer within {limit_s:g} s")
        except SandboxEnded as ended:
            failure = ended.failure
        except BaseException:
            await self._end()
            raise

        await self._end()
        raise SandboxEnded(failure)

    async def _read_for(self, number: int) -> dict[str, Any]:
        message = await self._read()
        if message.get("id") != number:
            raise violation("a reply to no request")
        return message

    async def _send_answer(self, call: dict[str, Any]) -> None:
        result, error = await self._call_tool(call["call"], call.get("arguments"))
        answer = {"result": result} if error is None else {"error": error}
        if isinstance(number := call.get("number"), int):
            self._write({"do": "answer", "number": number, **answer})

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


@sandboxes.register("none")
class Unconfined(LocalKind):
    """No protection except limits of memory, time and sizes: code that you wrote runs as this user,
    with its network and files. Used only if the recipe sets `type: none`."""

    name = "none"

    def obstacle(self) -> str:
        return ""

    def launch(self, section: SandboxSection) -> SandboxLaunch:
        folder = new_folder(PREFIX)
        return SandboxLaunch(
            [python_program(), "-I", "-S", "-B", str(INSIDE / "supervisor.py")],
            supervisor_settings(section, work=str(folder), is_alone=False, counts_processes=False),
            folder=folder,
            has_namespace=False,
            work=str(folder),
            clean=lambda: remove_folder(folder),
        )
