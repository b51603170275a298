"""One session with one MCP server, through the official SDK.

A connection has its own asyncio task, which enters and leaves the SDK's contexts. Any other task of
the same event loop can make calls. A server's answers are not trusted: its tools and results are
bounded, and the last STDERR_LINES of its stderr are used only in messages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agentevo.agents.tools.mcp_messages import problem_of, repair_messages
from agentevo.agents.tools.mcp_offers import (
    MAX_PAGES,
    RESOURCE_TOOLS,
    call_resource_tool,
    prompt_lines,
    prompt_text,
    read_parts,
    resource_lines,
)
from agentevo.agents.tools.mcp_stdio import MAX_MESSAGE, stdio_transport
from agentevo.agents.tools.result_parts import result_of_parts
from agentevo.agents.tools.tool import ToolResult, ToolSpec, object_schema
from agentevo.environments.sandbox.programs import ProgramConfinement
from agentevo.environments.sandbox.section import ProgramSandboxSection
from agentevo.errors import ToolArgumentsError, ToolUnavailableError, describe_error
from agentevo.runtime.console import without_controls
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.extras import load_extra

MAX_TOOLS = 1000
UNNAMED = "server"
"""The name of a server without a name."""
STDERR_BYTES = 4096
STDERR_LINES = 5
STDERR_S = 0.5
PROBE_S = 5.0
"""The time limit of the check whether a server that did not answer a call is alive."""
READ_S = 30 * 86_400.0
"""The read timeout of a server's HTTP connection. It is practically unlimited: calls and starts
have their own limits, and the SDK's 300 seconds would end a longer call and an idle SSE session."""
CONNECT_S = 30.0
CLOSING_S = 10.0
"""The longest wait for a server's end. The SDK kills a server that does not end by itself."""
FETCHERS = ("npx", "bunx", "uvx", "pipx", "docker", "podman")
"""Programs that download the package that they run. Without a network they print nothing."""
SHORTEST_SECRET = 6
"""The shortest secret to remove from messages, in characters. Shorter values, such as 1 or true,
can occur in any message."""


@dataclass(frozen=True)
class McpServer:
    """How a server is reached. `env` and `headers` can hold secrets, and so can any field that
    comes from another program's file. Messages use `shown`, and never a value of `secrets`."""

    name: str
    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: Path | None = None
    url: str | None = None
    transport: str = "http"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_timeout_s: float = 60.0
    prompt: str | None = None
    """The server's prompt that the policy reads first."""
    prompt_arguments: Mapping[str, str] = field(default_factory=dict)
    resources: bool = False
    """Whether its resources are also tools."""
    key_variable: str | None = None
    """The name of the environment variable whose key is among the headers."""
    shown: str = ""
    """The server's command or URL, for messages."""
    secrets: Sequence[str] = field(default=(), repr=False)
    sandbox: ProgramSandboxSection | None = None
    """The limits of the sandbox that `command` starts it in."""

    @property
    def title(self) -> str:
        """Its name in messages: the server's name, if it has one, and its place."""
        named = "" if self.name == UNNAMED else f" {self.name!r}"
        return f"the MCP server{named} ({self.shown})"


def check_package() -> None:
    """Raises MissingExtraError if the SDK is not installed."""
    load_extra("mcp", "mcp", "an entry of agent.tools for an MCP server")
    # The SDK skips lines of a server that are not messages; it only logs them.
    logging.getLogger("mcp").addHandler(logging.NullHandler())


class McpConnection:
    """See the module. A connection that was closed, or whose server is gone, is not opened
    again."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stderr = _ErrorTail()
        self.specs: Sequence[ToolSpec] = ()
        """The server's tools, once it is open."""
        self.instructions = ""
        """The text of the requested prompt, once it is open."""
        self._offered: set[str] = set()
        """The tools of RESOURCE_TOOLS that are offered."""
        self._status = 0
        """The status of the last answer over HTTP."""
        self._is_suspect = False
        """Whether a call had no answer. Then it is unknown whether the server still responds."""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    @property
    def has_ended(self) -> bool:
        """Whether the session and its process have ended."""
        return self._task is None or self._task.done()

    async def open(self) -> None:
        """Starts the server or connects to it, and lists its tools. Raises ToolUnavailableError."""
        ready = self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))

        limit_s = self._server.start_timeout_s
        try:
            await asyncio.wait_for(asyncio.shield(ready), limit_s)
        except TimeoutError:
            await self.close()
            raise ToolUnavailableError(
                self._words(f"it has not started within {limit_s:g} s{self._fetching()}")
            ) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the session and the server that was started for it."""
        self._closing.set()
        if self._task is None:
            return

        is_opening = self._ready is not None and not self._ready.done()
        if is_opening and not self._task.cancelling():
            # Closing would wait for a server that has not finished the handshake. After a second
            # cancellation the SDK would no longer end that server.
            self._task.cancel()

        _, running = await asyncio.wait([self._task], timeout=CLOSING_S)
        for task in running:
            task.cancel()
            await asyncio.wait([task], timeout=CLOSING_S)

    async def call(
        self, name: str, arguments: Mapping[str, Any], meta: Mapping[str, str]
    ) -> ToolResult:
        """Calls a tool. `meta`: the request's `_meta`, such as its trace context (MCP's SEP-414).
        Raises ToolArgumentsError, and ToolUnavailableError if the server is gone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
        from pydantic import ValidationError

        _check_sendable(arguments)
        client = self._client
        if client is None:
            raise ToolUnavailableError(self._words("it is gone"))

        try:
            if self._server.resources and name in self._offered:
                return await call_resource_tool(client, name, arguments)
            result = await client.call_tool(name, dict(arguments), meta=dict(meta) or None)
        except ToolArgumentsError:
            raise
        except asyncio.CancelledError:
            self._is_suspect = True
            raise
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolArgumentsError(error.message) from None
            # Servers also use the code of a closed connection for their own errors.
            is_doubtful = error.code in (CONNECTION_CLOSED, INVALID_REQUEST)
            if is_doubtful and not await self._responds():
                raise await self._lost(error) from error
            # The SDK reports an answer that it can't read in a dozen lines.
            is_unread = error.code == PARSE_ERROR
            message = error.message.partition("\n")[0] if is_unread else error.message
            return ToolResult(text=f"Error: {message}", is_error=True)
        except (ValidationError, RuntimeError) as error:
            # The server has answered, and the SDK rejects the answer.
            text = f"Error: {name} gave a result that breaks the protocol: {problem_of(error)}"
            return ToolResult(text=text, is_error=True)
        except Exception as error:
            raise await self._lost(error) from error

        return await _result_of(result)

    async def still_answers(self) -> bool:
        """Whether more calls can be made. After a call without an answer this asks the server for
        its tools."""
        if self._is_suspect and self.is_open:
            if await self._responds():
                self._is_suspect = False
            else:
                await self.close()

        return self.is_open

    async def _responds(self) -> bool:
        """Whether the server answers a request that every server supports."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001 (any exception means no answer)
            return False
        return True

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = await stack.enter_async_context(Client(transport, cache=None))
                self.specs = await self._tools(client)
                self.instructions = await self._prompt(client)
                self._client = client

                if not ready.done():
                    ready.set_result(None)

                await self._closing.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (groups of any exceptions of the SDK)
            if not ready.done():
                await self._stderr.settle()
                problem = f"{_first(error)}{self._remedy(error)}"
                ready.set_exception(ToolUnavailableError(self._words(problem)))
        finally:
            self._client = None
            if not ready.done():
                ready.set_exception(ToolUnavailableError(self._words("it was ended")))
            ready.exception()  # marks the error as retrieved, because there may be no other waiter

    async def _transport(self, stack: AsyncExitStack) -> Any:
        server = self._server
        if server.command is not None:
            confinement = None
            if server.sandbox is not None:
                confinement = await in_thread(ProgramConfinement, server.sandbox)
                stack.push_async_callback(in_thread, confinement.end)
            errors = stack.enter_context(await self._stderr.open())
            words = [server.command, *server.args]
            return stdio_transport(words, server.env, server.cwd, errors, confinement)

        if server.transport == "sse":
            from mcp.client.sse import sse_client

            return repair_messages(
                sse_client(str(server.url), headers=dict(server.headers), sse_read_timeout=READ_S)
            )

        import httpx2
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        limits = httpx2.Timeout(CONNECT_S, read=READ_S)
        client = create_mcp_http_client(headers=dict(server.headers), timeout=limits)
        client.event_hooks["response"].append(self._note_status)
        return repair_messages(
            streamable_http_client(
                str(server.url),
                http_client=await stack.enter_async_context(client),
                max_sse_event_size=MAX_MESSAGE,
            )
        )

    async def _tools(self, client: Any) -> list[ToolSpec]:
        by_name: dict[str, ToolSpec] = {}
        cursor = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                # If two tools have one name, the first is used.
                by_name.setdefault(
                    tool.name,
                    ToolSpec(
                        name=tool.name,
                        description=tool.description or "",
                        parameters=object_schema(tool.input_schema),
                        changes_nothing=getattr(tool.annotations, "read_only_hint", None),
                        is_destructive=bool(getattr(tool.annotations, "destructive_hint", False)),
                    ),
                )

            cursor = page.next_cursor
            if not cursor or len(by_name) > MAX_TOOLS:
                break

        if len(by_name) > MAX_TOOLS:
            raise ToolUnavailableError(f"it has more than {MAX_TOOLS} tools")

        specs = list(by_name.values())
        if self._server.resources:
            offered = [spec for spec in RESOURCE_TOOLS if spec.name not in by_name]
            self._offered = {spec.name for spec in offered}
            specs += offered

        return specs

    async def _prompt(self, client: Any) -> str:
        server = self._server
        if server.prompt is None:
            return ""
        return await prompt_text(client, server.prompt, server.prompt_arguments)

    async def offers(self) -> tuple[list[str], list[str]]:
        """A line for each prompt and each resource of an open server. Raises
        ToolUnavailableError."""
        try:
            return await prompt_lines(self._client), await resource_lines(self._client)
        except Exception as error:
            raise await self._lost(error) from error

    async def _lost(self, error: BaseException) -> ToolUnavailableError:
        self._closing.set()
        self._client = None
        await self._stderr.settle()
        return ToolUnavailableError(self._words(f"it is gone ({_first(error)})"), was_sent=True)

    async def _note_status(self, response: Any) -> None:
        """Keeps the HTTP status, which the SDK's error does not have."""
        self._status = response.status_code

    def _remedy(self, error: BaseException) -> str:
        """The remedy if nothing answers at a URL, if another program does, or if the key is
        refused."""
        from mcp import MCPError
        from mcp_types import METHOD_NOT_FOUND

        error = _innermost(error)
        if self._server.url is None:
            return ""
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            return ": nothing listens there: start the server, or correct the URL"

        status = getattr(getattr(error, "response", None), "status_code", self._status)
        if status in (401, 403):
            return f": HTTP {status}: {self._key_remedy()}"
        if status == 404 or (isinstance(error, MCPError) and error.code == METHOD_NOT_FOUND):
            return ": there is no server at this path of the URL: most are at /mcp, or at /sse"

        return ""

    def _fetching(self) -> str:
        """The remedy if a program may be waiting for a package."""
        words = [self._server.command or "", *self._server.args]
        program = next((name for name in map(os.path.basename, words) if name in FETCHERS), None)
        if program is None:
            return ""
        return (
            f": {program} downloads a package that is not installed, which takes a network (in a "
            "sandbox `network: true`) and time (`start_timeout_s`): install the package first, "
            "and give the package's program as `command`"
        )

    def _key_remedy(self) -> str:
        server = self._server
        if server.key_variable is not None:
            return f"it does not take the key of the environment variable {server.key_variable}"
        if server.headers:
            return "it does not take the key in its `headers`"
        return "it wants a key: give api_key: ${env:NAME}, the environment variable that holds it"

    def _words(self, problem: str) -> str:
        stderr_text = without_controls(self._stderr.text)
        suffix = f"; it said: {stderr_text}" if stderr_text else ""
        return without_secrets(self._server.secrets, f"{self._server.title}: {problem}{suffix}")


class _ErrorTail(asyncio.Protocol):
    """The last lines that a server writes to stderr."""

    def __init__(self) -> None:
        self._bytes = b""
        self._is_open = False
        self._ended = asyncio.Event()

    @property
    def text(self) -> str:
        lines = self._bytes.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-STDERR_LINES:])

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._bytes = (self._bytes + data)[-STDERR_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._ended.set()

    async def settle(self) -> None:
        """Waits until the stderr of an ended server is read, for at most STDERR_S."""
        if self._is_open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), STDERR_S)

    async def open(self) -> Any:
        """A file for the server to write to."""
        read, write = os.pipe()
        self._is_open = True
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self, os.fdopen(read, "rb"))
        return os.fdopen(write, "w")


def without_secrets(secrets: Sequence[str], text: str) -> str:
    """The message with these values removed."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _check_sendable(arguments: Mapping[str, Any]) -> None:
    """Raises ToolArgumentsError for arguments that the SDK can't write, since its failure would end
    the connection: halves of surrogate pairs, and nesting too deep for pydantic."""
    message = {"params": {"arguments": dict(arguments)}}
    try:
        _writer().dump_json(message)
    except ValueError as error:
        raise ToolArgumentsError(f"the arguments can't be sent as JSON: {error}") from None


@cache
def _writer() -> Any:
    """The serializer, made once: making it takes as long as a whole call."""
    import pydantic

    return pydantic.TypeAdapter(dict[str, Any])


def _innermost(error: BaseException) -> BaseException:
    """The first exception that is not a group: the SDK's tasks raise groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _first(error: BaseException) -> str:
    """The innermost reason."""
    error = _innermost(error)
    if isinstance(error, ToolUnavailableError):
        return str(error)
    return describe_error(error)


async def _result_of(answer: Any) -> ToolResult:
    """The content of an answer as texts and images. Other content is only named."""
    parts = await read_parts(answer.content)
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]

    result = result_of_parts(parts, is_error=answer.is_error)
    return result.with_text(f"Error: {result.text}") if answer.is_error else result
