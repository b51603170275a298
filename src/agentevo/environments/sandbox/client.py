"""What a sandbox of this machine (local.py) and one of another machine (remote.py) have in common:
the checks of a call, the calls of the host's tools, the files, and the results of a sandbox that
has ended."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from agentevo.environments.sandbox.inside.frames import LARGEST_CALL
from agentevo.environments.sandbox.sandbox import Execution, Failure, ProgramRun, SandboxTool
from agentevo.errors import AgentEvoError, SandboxError, storable
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.files import atomic_folder

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

_T = TypeVar("_T")
LONGEST_CODE = 4 * 2**20


class SandboxReply(msgspec.Struct):
    """The reply to any call that runs code."""

    error: Failure | None
    stdout: str
    stderr: str
    files: list[str]


class RunReply(SandboxReply):
    """The reply to `run`."""

    is_alive: bool
    is_new: bool
    value: str | None


class ProgramReply(SandboxReply):
    """The reply to `execute`."""

    exit_code: int | None


class SandboxEnded(Exception):
    """The whole sandbox has ended."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def violation(what: str) -> SandboxEnded:
    """The error for a sandbox that sent an invalid message, described by `what`."""
    return SandboxEnded(Failure("ProtocolViolation", f"the sandbox sent {what}, and was ended"))


def storable_failure(failure: Failure | None) -> Failure | None:
    if failure is None:
        return None
    return Failure(
        storable(failure.type, 300), storable(failure.message), storable(failure.traceback, 8000)
    )


def is_unicode(text: str) -> bool:
    """Whether a text can be sent as UTF-8. A model's JSON can contain halves of surrogate pairs,
    which UTF-8 does not allow."""
    return text.isascii() or text.encode("utf-8", "replace").decode() == text


def code_problem(code: str) -> Failure | None:
    """The failure for code that can't be sent. None for other code."""
    if len(code) > LONGEST_CODE:
        return Failure("ValueError", f"{len(code):,} characters of code, at most 4 MiB")
    if not is_unicode(code):
        return Failure("UnicodeEncodeError", "the code is no text: it has half of a surrogate pair")
    return None


def longest_message(section: SandboxSection) -> int:
    """The maximum size in bytes of a message from a sandbox of this section."""
    output = 3 * section.output_kib * 1024 * 6
    files = section.file_mib * 2**20 * 3 // 2 + section.max_files * 1100
    return output + files + 2 * LARGEST_CALL


class SandboxClient(ABC):
    """The host's side of a sandbox; see Sandbox. One call runs at a time."""

    server_lost: ClassVar[bool] = False
    """Whether the end of the sandbox leaves the effects of a program unknown."""

    def __init__(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> None:
        self._section = section
        self._tools = dict(tools)
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._num_calls = 0

    @abstractmethod
    async def start(self) -> None:
        """Raises SandboxError."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _is_running(self) -> bool: ...

    @abstractmethod
    async def _end(self) -> None:
        """Ends the sandbox, if it runs."""

    @abstractmethod
    async def _run(self, code: str, limit_s: float) -> Execution:
        """Raises SandboxEnded, as the next two do."""

    @abstractmethod
    async def _execute(self, argv: Sequence[str], stdin: bytes, limit_s: float) -> ProgramRun: ...

    @abstractmethod
    async def _file_request(self, do: str, kind: type[_T], **fields: Any) -> _T: ...

    @abstractmethod
    async def _send_answer(self, call: Any) -> None:
        """Sends the result of the code's call of a tool."""

    async def run(self, code: str, deadline_s: float | None = None) -> Execution:
        limit = self._deadline(deadline_s)
        if (refusal := code_problem(code)) is not None:
            return Execution("", "", None, refusal, (), 0.0, is_alive=True, is_new=False)

        async with self._lock:
            is_new = await self._ensure_running()
            started_at = time.monotonic()
            self._num_calls = 0
            try:
                execution = await self._run(code, limit)
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
        limit = self._deadline(deadline_s)
        if not argv or any("\0" in word or not is_unicode(word) for word in argv):
            raise SandboxError("execute takes a command as a list of strings without NUL")
        self._check_size("stdin", stdin)

        async with self._lock:
            await self._ensure_running()
            started_at = time.monotonic()
            try:
                return await self._execute(argv, stdin, limit)
            except SandboxEnded as ended:
                return ProgramRun(
                    stdout="",
                    stderr="",
                    exit_code=None,
                    error=ended.failure,
                    files=(),
                    duration_s=time.monotonic() - started_at,
                    files_lost=True,
                    server_lost=self.server_lost,
                )

    async def files(self) -> dict[str, int]:
        return await self._ask_files("files", dict[str, int])

    async def read_file(self, path: str) -> bytes:
        text = await self._ask_files("read", str, path=path)
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise SandboxError(f"{path}: the sandbox's reply is not a file") from error

    async def write_file(self, path: str, content: bytes) -> None:
        self._check_size(path, content)
        await self._ask_files("write", type(None), path=path, content=content)

    async def export(self, folder: Path) -> tuple[str, ...]:
        """See Sandbox.export. Raises SandboxError, and OSError if the folder can't be written."""
        written: list[str] = []
        total = 0
        paths = [path for path in await self.files() if _is_inner_path(path)]
        with atomic_folder(folder) as staging:
            for path in paths:
                try:
                    content = await self.read_file(path)
                except SandboxError:
                    if not await self._is_running():
                        raise
                    continue  # its name is not UTF-8, or it was deleted in between

                total += len(content)
                if total > self._section.disk_mib * 2**20:
                    raise SandboxError("export: the files have more bytes than disk_mib allows")

                await in_thread(_write, staging / path, content)
                written.append(path)

        return tuple(written)

    async def _ask_files(self, do: str, kind: type[_T], **fields: Any) -> _T:
        path = fields.get("path", "")
        if not is_unicode(path):
            raise SandboxError(f"the path {path[:200]!r} is not valid Unicode: give another name")

        async with self._lock:
            await self._ensure_running()
            try:
                return await self._file_request(do, kind, **fields)
            except SandboxEnded as ended:
                raise SandboxError(f"the sandbox has ended: {ended.failure.message}") from ended

    async def _ensure_running(self) -> bool:
        """Starts another sandbox if the last one has ended. Returns whether it did."""
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        if await self._is_running():
            return False

        await self.start()
        if self._is_closed:  # `close` ran while the sandbox was starting
            await self._end()
            raise SandboxError("the sandbox is closed")

        return True

    async def _reply(
        self, receive: Callable[[], Awaitable[_T]], is_call: Callable[[_T], bool]
    ) -> _T:
        """The next message that is not a call of a tool. Answers the calls before it."""
        calling: asyncio.Task[None] | None = None
        try:
            while True:
                message = await receive()
                if not is_call(message):
                    return message
                if calling is not None and not calling.done():
                    calling.cancel()  # the code no longer waits for it

                calling = asyncio.create_task(self._send_answer(message))
        finally:
            if calling is not None:
                calling.cancel()
                await asyncio.wait([calling], timeout=1.0)

    async def _call_tool(self, name: Any, arguments: Any) -> tuple[Any, str | None]:
        """The result of the code's call of a tool, or None and the error."""
        tool = self._tools.get(name) if isinstance(name, str) else None
        limit = self._section.max_tool_calls
        try:
            if tool is None or not isinstance(arguments, dict):
                raise SandboxError(f"there is no tool {storable(str(name), 100)!r}")

            self._num_calls += 1
            if self._num_calls > limit:
                raise SandboxError(f"more than max_tool_calls={limit} tool calls in one run")

            result = await tool.call(arguments)
            if len(msgspec.json.encode(result)) > LARGEST_CALL:
                raise SandboxError(f"{name}: the result has more than {LARGEST_CALL:,} bytes")
            return result, None
        except AgentEvoError as error:
            return None, storable(str(error))
        except Exception as error:  # noqa: BLE001 (a tool's author may raise anything)
            return None, f"{storable(str(name), 100)} has failed: {type(error).__name__}"

    def _deadline(self, deadline_s: float | None) -> float:
        limit = self._section.timeout_s if deadline_s is None else deadline_s
        if not 0 < limit < 1e6:
            raise SandboxError(f"a deadline of {limit} s: give seconds above 0 and below a million")
        return limit

    def _check_size(self, name: str, content: bytes) -> None:
        if len(content) > self._section.file_mib * 2**20:
            raise SandboxError(f"{name}: more than file_mib, {self._section.file_mib} MiB")


def _is_inner_path(path: str) -> bool:
    """Whether a path that the sandbox sent stays within its folder."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not any(part in ("", ".", "..") for part in parts)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
