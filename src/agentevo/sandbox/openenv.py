"""OpenEnv's coding environment as a sandbox: an episode is an interpreter, a step is a call.

It speaks over the WebSocket of an OpenEnv server: `reset`, then `step` with `{"code": ...}`, whose
observation has stdout, stderr and exit_code. A step that is late ends the episode, and with it the
variables.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentevo.errors import SandboxError, described, storable
from agentevo.http_clients import is_loopback
from agentevo.parsing import ParseError, parse_json
from agentevo.sandbox.code_only import LARGEST_ANSWER, CodeOnlySandbox, ServerLost, refuse_tools
from agentevo.sandbox.remote import CLOSE_S, authorization
from agentevo.sandbox.sandbox import Failure, Sandbox, SandboxTool, sandboxes
from agentevo.trace_header import trace_headers

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from agentevo.config.sandbox import SandboxSection

SERVER = "OpenEnv's coding environment"
NO_SESSION_LEFT = "CAPACITY_REACHED"
AGAIN_S = 0.2
"""Pause before a server without a free session is asked again."""


@sandboxes.register("openenv")
class OpenEnv:
    """OpenEnv's coding environment at `url`: code alone, no files, no tools."""

    async def problem(self, section: SandboxSection) -> str:
        """See SandboxKind."""
        return await OpenEnvSandbox(section).tried()

    async def open(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> Sandbox:
        """Raises SandboxError."""
        refuse_tools(SERVER, tools)
        sandbox = OpenEnvSandbox(section)
        await sandbox.start()
        return sandbox


class OpenEnvSandbox(CodeOnlySandbox):
    """One episode after the other."""

    server = SERVER

    def __init__(self, section: SandboxSection) -> None:
        super().__init__(section)
        self._lock = asyncio.Lock()
        self._connection: ClientConnection | None = None

    async def start(self) -> None:
        """Raises SandboxError."""
        url = self.section.url
        ends_at = time.monotonic() + self.section.wait_timeout_s
        while True:
            try:
                await self._connect()
                kind, data = await self._asked("reset", {}, self.section.start_timeout_s)
            except ServerLost as error:
                raise SandboxError(f"{url}: {error}") from error
            except BaseException:
                self._end()
                raise

            if kind != "error":
                return

            self._end()
            if data.get("code") != NO_SESSION_LEFT or time.monotonic() > ends_at:
                reason = storable(str(data.get("message")), 300)
                raise SandboxError(f"{url}: no episode was begun ({reason})")

            await asyncio.sleep(AGAIN_S)

    async def ran(self, code: str, limit_s: float) -> tuple[str, str, Failure | None, bool]:
        """See CodeOnlySandbox.ran."""
        async with self._lock:
            is_new = self._connection is None
            if is_new:
                await self.start()

            try:
                kind, data = await self._asked("step", {"code": code}, limit_s)
            except BaseException:
                self._end()
                raise

            seen = data.get("observation")
            if kind == "error" or not isinstance(seen, dict):
                self._end()
                said = storable(str(data.get("message") or data), 500)
                raise ServerLost("ServerLost", f"{SERVER} has failed: {said}")

            if data.get("done") is True:
                self._end()  # the next call has another episode

        texts = [seen.get(name) for name in ("stdout", "stderr")]
        stdout, stderr = (one if isinstance(one, str) else "" for one in texts)
        status = seen.get("exit_code", 0)
        failed = status not in (0, None)
        error = Failure("CodeFailed", f"exit code {storable(str(status), 100)}") if failed else None
        return stdout, stderr, error, is_new

    async def close(self) -> None:
        """See Sandbox.close."""
        await super().close()
        connection = self._connection
        self._connection = None

        if connection is not None:
            try:
                async with asyncio.timeout(2 * CLOSE_S):
                    await connection.close()
            except TimeoutError:
                connection.transport.abort()

    def _end(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.transport.abort()

    async def _connect(self) -> None:
        """Raises SandboxError."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = str(self.section.url).rstrip("/")
        own: dict[str, Any] = {"proxy": None} if is_loopback(url) else {}
        try:
            self._connection = await connect(
                f"ws{url.removeprefix('http')}/ws",
                additional_headers={**authorization(self.section), **trace_headers()},
                open_timeout=self.section.start_timeout_s,
                close_timeout=CLOSE_S,
                max_size=LARGEST_ANSWER,
                **own,
            )
        except (OSError, WebSocketException, ValueError) as error:
            raise SandboxError(
                f"{url}: no server of OpenEnv can be reached ({storable(described(error), 300)}): "
                "start it, or correct the url"
            ) from error

    async def _asked(
        self, kind: str, data: dict[str, Any], limit_s: float
    ) -> tuple[str, dict[str, Any]]:
        """The kind and the data of the answer. Raises ServerLost."""
        from websockets.exceptions import ConnectionClosed

        assert self._connection is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.send(json.dumps({"type": kind, "data": data}))
                text = await self._connection.recv()
            answer = parse_json(text if isinstance(text, str) else text.decode())
        except TimeoutError:
            raise ServerLost("Timeout", f"{SERVER} gave no answer in {limit_s:g} s") from None
        except (ConnectionClosed, OSError) as error:
            raise ServerLost("ServerLost", f"the connection to {SERVER} ended ({error})") from error
        except (ParseError, UnicodeDecodeError) as error:
            raise ServerLost("ProtocolViolation", f"no JSON was answered ({error})") from error

        inside = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(inside, dict):
            raise ServerLost("ProtocolViolation", "the answer is none of an OpenEnv server")

        return str(answer.get("type")), inside
