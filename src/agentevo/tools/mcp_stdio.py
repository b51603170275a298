"""An MCP server that is started, and spoken to over its stdin and stdout, a message a line.

The SDK's transport joins what it has of a line with every piece that comes, which takes a minute
for 20 MB, and holds lines of any length. Here the time is linear in what a server says, and a line
is read up to MAX_MESSAGE bytes: of a longer one both ends are kept, which tell whose answer it is,
and that request fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentevo.sandbox.programs import Walls
from agentevo.tools import server_guard
from agentevo.tools.mcp_messages import make_refusal, read_message

MAX_MESSAGE = 64 * 2**20
"""Bytes of a line."""
ENDS = 512
"""Bytes that are kept of either end of a longer one."""
PIECE = 2**18
GUARD = (sys.executable, "-I", "-S", "-B", str(server_guard.__file__))
END_S = 4 * server_guard.GRACE_S
"""How long its guard may take to end a server."""
_LOOK_S = 0.01
_FIRST_ID = re.compile(rb'\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*,')
_LAST_ID = re.compile(rb'\}\s*,\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*\}\s*\Z')


@asynccontextmanager
async def stdio_transport(
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None,
    errors: Any,
    walls: Walls | None = None,
) -> AsyncIterator[tuple[Any, Any]]:
    """See mcp.client._transport.Transport. `env`: variables in addition to PATH, HOME and the like.
    `errors`: the file for the server's stderr; the guard writes there too, about a program that
    can't be started. All that the server starts ends with the block, and with this process. `walls`
    are those of a server in a sandbox."""
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *GUARD,
        str(os.getpid()),
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=get_default_environment() | dict(env),
        cwd=cwd,
        start_new_session=True,
        limit=PIECE,
    )

    assert process.stdin is not None and process.stdout is not None

    # There is no await before the task group: a cancellation would leave the process.
    if walls is not None:
        walls.surround(process.pid, partial(_write_error, errors))

    incoming, read_stream = anyio.create_memory_object_stream[Any](0)
    write_stream, outgoing = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process.stdout, incoming)
        tasks.start_soon(_write, process.stdin, outgoing, incoming)
        try:
            yield read_stream, write_stream
        finally:
            with anyio.CancelScope(shield=True):
                read_stream.close()
                write_stream.close()
                await _end(process)
            tasks.cancel_scope.cancel()


def _write_error(errors: Any, line: str) -> None:
    """Appends a line to the server's stderr."""
    with suppress(OSError, ValueError):  # the file is closed
        os.write(errors.fileno(), f"\n{line}\n".encode())


async def _read(stdout: asyncio.StreamReader, incoming: Any) -> None:
    """What the server says, to the session."""
    import anyio

    async with incoming:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for message in _messages(stdout):
                await incoming.send(message)

    # A server that still has something to say could not end otherwise.
    while await stdout.read(PIECE):
        pass


async def _messages(stdout: asyncio.StreamReader) -> AsyncIterator[Any]:
    line = bytearray()
    length = 0
    while piece := await stdout.read(PIECE):
        *ends, begin = piece.split(b"\n")
        for end in ends:
            line += end
            length += len(end)
            if (message := _message(line, length)) is not None:
                yield message
            line = bytearray()
            length = 0

        line += begin
        length += len(begin)
        if length > MAX_MESSAGE:
            del line[ENDS:-ENDS]


def _message(line: bytearray, length: int) -> Any:
    """The message of a line; None for an empty line."""
    if length > MAX_MESSAGE:
        match = _FIRST_ID.match(line) or _LAST_ID.search(line, len(line) - ENDS)
        reason = f"it has more than {MAX_MESSAGE:,} bytes"
        return make_refusal(int(match[1]), reason) if match is not None else ValueError(reason)

    text = line.decode(errors="replace").strip()
    return read_message(text) if text else None


async def _write(stdin: asyncio.StreamWriter, outgoing: Any, incoming: Any) -> None:
    """What the session says, to the server, whose stdin ends with it."""
    try:
        async with outgoing:
            async for item in outgoing:
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(f"{line}\n".encode())
                await stdin.drain()
    except OSError:
        await incoming.aclose()  # the waiter for an answer learns that there is none
    finally:
        stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a server whose stdin has ended, and of all that it started."""
    with suppress(ProcessLookupError):
        process.terminate()  # tells its guard
    if not await _has_ended(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _has_ended(process)

    # Its pipes may be open in a process that it left behind.
    with suppress(PermissionError):
        process._transport.close()  # type: ignore[attr-defined]


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Within END_S. `Process.wait` would wait for the ends of the pipes as well."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while process.returncode is None:
                await asyncio.sleep(_LOOK_S)
    return process.returncode is not None
