"""Repairs an MCP server's messages so that the SDK accepts them.

The SDK rejects a whole message if one part of it breaks the protocol: one odd tool costs the whole
list, and an invalid answer leaves its request waiting. Here only the odd tools are dropped from a
list, and an answer that can't be read becomes an error of its request.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from agentevo.agents.tools.tool import object_schema

HINTS = ("readOnlyHint", "destructiveHint")
"""What a server says about its tools, as far as it is used."""
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


def read_message(text: str) -> Any:
    """Parses a text into a message for the SDK's session. If the text is not a message, returns a
    ValueError with the reason, which the session ignores."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        message = jsonrpc_message_adapter.validate_json(text, by_name=False)
    except ValueError as error:
        return _salvage(text) or error

    return SessionMessage(_usable(message))


def make_refusal(request_id: int | str, reason: str) -> Any:
    """The error message to a request whose answer is invalid."""
    from mcp.shared.message import SessionMessage
    from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError

    error = ErrorData(code=PARSE_ERROR, message=f"the server's answer can't be read: {reason}")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


def problem_of(error: Exception) -> str:
    """Why the SDK rejects a result, in one line."""
    import pydantic

    if not isinstance(error, pydantic.ValidationError):
        return str(error).partition("\n")[0]
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


@asynccontextmanager
async def repair_messages(
    transport: AbstractAsyncContextManager[Any],
) -> AsyncIterator[tuple[Any, Any]]:
    """An SDK transport with its messages repaired as above."""
    async with transport as (read_stream, write_stream):
        yield _RepairedStream(read_stream), write_stream


class _RepairedStream:
    """See mcp.shared._stream_protocols.ReadStream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def last_context(self) -> Any:
        """The context of the sender of the last message."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return _repair_item(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _RepairedStream:
        return self

    async def __anext__(self) -> Any:
        return _repair_item(await self._stream.__anext__())

    async def __aenter__(self) -> _RepairedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> Any:
        return await self._stream.__aexit__(*exception)


def _repair_item(item: Any) -> Any:
    """The message, or a replacement if the SDK could not read it."""
    import pydantic

    if isinstance(item, pydantic.ValidationError):
        text = item.errors(include_url=False)[0]["input"]
        return read_message(text) if isinstance(text, str) else item
    if not isinstance(item, Exception):
        _usable(item.message)
    return item


def _salvage(text: str) -> Any:
    """Repairs a text that the SDK does not accept. Returns the message without halves of surrogate
    pairs, or an error for the request that the text answers. None if it answers no request."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        tree = json.loads(text)
        repaired = _HALF_OF_A_PAIR.sub("\ufffd", json.dumps(tree, ensure_ascii=False))
    except (ValueError, RecursionError):
        return None

    try:
        message = jsonrpc_message_adapter.validate_json(repaired, by_name=False)
    except ValueError:
        request_id = tree.get("id") if isinstance(tree, dict) and "method" not in tree else None
        if not isinstance(request_id, (int, str)) or isinstance(request_id, bool):
            return None
        return make_refusal(request_id, "it is not a JSON-RPC 2.0 response")

    return SessionMessage(_usable(message))


def _usable(message: Any) -> Any:
    """The message; a list of tools is repaired so that the SDK accepts it."""
    result = getattr(message, "result", None)
    if isinstance(result, dict) and isinstance(result.get("tools"), list):
        result["tools"] = [
            _tool(tool)
            for tool in result["tools"]
            if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool["name"]
        ]
    return message


def _tool(listed: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tool that are used."""
    tool = {"name": listed["name"], "inputSchema": object_schema(listed.get("inputSchema"))}
    if isinstance(listed.get("description"), str):
        tool["description"] = listed["description"]

    annotations = listed.get("annotations")
    hints = annotations.items() if isinstance(annotations, dict) else ()
    tool["annotations"] = {
        name: hint for name, hint in hints if name in HINTS and isinstance(hint, bool)
    }

    result = listed.get("outputSchema")
    if isinstance(result, dict) and result.get("type") == "object":
        tool["outputSchema"] = object_schema(result)
    return tool
