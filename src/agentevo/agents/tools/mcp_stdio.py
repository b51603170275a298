"""A transport that starts an MCP server and uses its stdin and stdout, one message per line.

The SDK's transport copies a partial line with every new piece, which takes a minute for 20 MB, and
it holds lines of any length. Here the time is linear in the number of bytes, and a line has at most
MAX_MESSAGE bytes. If a line is longer, only its two ends are kept. They identify the request, which
then fails.
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

from agentevo.agents.tools import server_guard
from agentevo.agents.tools.mcp_messages import make_refusal, read_message
from agentevo.environments.sandbox.programs import ProgramConfinement

MAX_MESSAGE = 64 * 2**20
"""The maximum number of bytes of a line."""
ENDS = 512
"""The number of bytes that are kept at each end of a longer line."""
PIECE = 2**18
GUARD = (sys.executable, "-I", "-S", "-B", str(server_guard.__file__))
END_S = 4 * server_guard.GRACE_S
"""The time limit for the guard to end a server."""
_POLL_INTERVAL_S = 0.01
_FIRST_ID = re.compile(rb'\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*,')
_LAST_ID = re.compile(rb'\}\s*,\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*\}\s*\Z')


@asynccontextmanager
async def stdio_transport(
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None,
    errors: Any,
    confinement: ProgramConfinement | None = None,
) -> AsyncIterator[tuple[Any, Any]]:
    """See mcp.client._transport.Transport. `env`: variables in addition to PATH, HOME and the like.
    `errors`: the file for the server's stderr; if the program can't be started, the guard writes
    the reason there. All processes that the server starts end with the block, and with this
    process. `confinement`: the sandbox of the server, if it has one."""
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

    # No await before the task group: a cancellation there would leave the process running.
    if confinement is not None:
        confinement.apply(process.pid, partial(_write_error, errors))

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
    with suppress(OSError, ValueError):  # the file may be closed
        os.write(errors.fileno(), f"\n{line}\n".encode())


async def _read(stdout: asyncio.StreamReader, incoming: Any) -> None:
    """Passes the server's messages to the session."""
    import anyio

    async with incoming:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for message in _messages(stdout):
                await incoming.send(message)

    # Otherwise a server that still writes could not end.
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
    """Passes the session's messages to the server, and closes the server's stdin at the end."""
    try:
        async with outgoing:
            async for item in outgoing:
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(f"{line}\n".encode())
                await stdin.drain()
    except OSError:
        await incoming.aclose()  # ends the wait for an answer
    finally:
        stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a server whose stdin is closed, and of all processes that it started."""
    with suppress(ProcessLookupError):
        process.terminate()  # the guard gets the signal
    if not await _has_ended(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _has_ended(process)

    # A process that the server left behind may still hold its pipes.
    with suppress(PermissionError):
        process._transport.close()  # type: ignore[attr-defined]


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Whether the server ends within END_S. `Process.wait` would also wait for the pipes to
    close."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while process.returncode is None:
                await asyncio.sleep(_POLL_INTERVAL_S)
    return process.returncode is not None
