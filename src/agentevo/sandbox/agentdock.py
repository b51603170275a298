"""AgentDock's tool `execute_code` as a sandbox: a POST for each call to a node's API, whose answer
is what the code printed.

A node belongs to nobody: no variable lives from one call to the next, and errors come inside of
answers with status 200.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentevo.errors import SandboxError, described, storable
from agentevo.http_clients import is_loopback, trusted_context
from agentevo.parsing import ParseError, parse_json
from agentevo.sandbox.code_only import LARGEST_ANSWER, CodeOnlySandbox, ServerLost, refuse_tools
from agentevo.sandbox.remote import authorization
from agentevo.sandbox.sandbox import Failure, Sandbox, SandboxTool, sandboxes
from agentevo.trace_header import trace_headers

if TYPE_CHECKING:
    from agentevo.config.sandbox import SandboxSection

SERVER = "AgentDock's execute_code"
TOOL = "python.execute_code"
CONNECT_S = 30.0


@sandboxes.register("agentdock")
class AgentDock:
    """The tool python.execute_code of an AgentDock node at `url` (.../mcpapi): code alone, no
    files, no tools, and every call has an interpreter of its own."""

    async def problem(self, section: SandboxSection) -> str:
        """See SandboxKind."""
        return await AgentDockSandbox(section).tried()

    async def open(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> Sandbox:
        """Raises SandboxError."""
        refuse_tools(SERVER, tools)
        return AgentDockSandbox(section)


class AgentDockSandbox(CodeOnlySandbox):
    """Calls of a node."""

    server = SERVER

    def __init__(self, section: SandboxSection) -> None:
        super().__init__(section)
        self._num_calls = 0

    async def start(self) -> None:
        """There is nothing to start."""

    async def ran(self, code: str, limit_s: float) -> tuple[str, str, Failure | None, bool]:
        """See CodeOnlySandbox.ran."""
        is_new = self._num_calls > 0
        self._num_calls += 1
        try:
            async with asyncio.timeout(limit_s):
                status, body = await self._asked(json.dumps({"code": code}).encode())
        except TimeoutError:
            raise ServerLost("Timeout", f"{SERVER} gave no answer in {limit_s:g} s") from None

        try:
            answer = parse_json(body.decode())
        except (ParseError, UnicodeDecodeError) as error:
            raise ServerLost("ProtocolViolation", f"HTTP {status}, and no JSON") from error

        if status >= 400 or not isinstance(answer, dict):
            said = storable(str(answer), 500)
            raise SandboxError(f"{self.section.url}: {SERVER} was refused (HTTP {status}): {said}")

        inner = answer.get("status_code")
        if isinstance(inner, int) and inner >= 400:
            return "", "", Failure("CodeFailed", storable(_text(answer.get("detail")))), is_new

        return (*_outcome(answer.get("content")), is_new)

    async def _asked(self, content: bytes) -> tuple[int, bytes]:
        """Status and body. Raises ServerLost, and SandboxError where nothing was sent."""
        import httpx

        url = str(self.section.url).rstrip("/")
        headers = {
            "Content-Type": "application/json",
            **authorization(self.section),
            **trace_headers(),
        }
        body = bytearray()
        try:
            async with (
                httpx.AsyncClient(
                    timeout=httpx.Timeout(None, connect=CONNECT_S),
                    trust_env=not is_loopback(url),
                    verify=trusted_context(),
                ) as client,
                client.stream(
                    "POST", f"{url}/tool/{TOOL}", content=content, headers=headers
                ) as response,
            ):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > LARGEST_ANSWER:
                        most = LARGEST_ANSWER // 2**20
                        raise ServerLost("ProtocolViolation", f"more than {most} MiB of answer")
                return response.status_code, bytes(body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            raise SandboxError(
                f"{url} can't be reached ({storable(described(error), 300)}): start the node, or "
                "correct the url, which ends with /mcpapi"
            ) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise ServerLost("ServerLost", f"the answer broke off ({described(error)})") from error


def _outcome(content: Any) -> tuple[str, str, Failure | None]:
    """stdout, stderr and the failure that a content tells."""
    if content is None or content in ({}, []):
        return "", "", Failure("CodeFailed", "the tool returned nothing")

    if isinstance(content, list):
        parts = [one.get("text", "") if isinstance(one, dict) else one for one in content]
        return "\n".join(map(_text, parts)), "", None

    if not isinstance(content, dict):
        return _text(content), "", None

    error = content.get("error")
    failed = bool(error) or content.get("status") == "error"
    failure = Failure("CodeFailed", storable(_text(error or content))) if failed else None
    named = {name: _text(content[name]) for name in ("stdout", "stderr") if content.get(name)}
    if named or failed:
        return named.get("stdout", ""), named.get("stderr", ""), failure

    return _text(content), "", None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
