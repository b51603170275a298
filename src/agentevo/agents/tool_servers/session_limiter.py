"""The layer before the SDK's MCP server over HTTP: checks the key and the protocol's revision, and
ends idle sessions to make room for new ones.

A client that ends its session frees its place immediately, but a client that vanished does not. If
no place is free, a session without a waiting client is ended. This is a session whose stream of
server messages closed at least GONE_S ago, as happens when the client ends. If there is none, it is
a session without requests for SILENT_S, the longest idle one first. If the client of an ended
session still exists, it gets the protocol's answer for an unknown session (404).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

GONE_S = 30.0
SILENT_S = 300.0
SESSION = "mcp-session-id"


@dataclass
class _ToolServerSession:
    """What is known about one session."""

    used: float
    """The time when its last request or stream ended."""
    running: int = 0
    """The number of current requests and streams."""
    is_gone: bool = False
    """Whether its stream has ended without a later request."""


class SessionLimiter:
    """See the module. `app`: the SDK's application, with at most `most` sessions."""

    def __init__(self, app: Any, key: str | None, most: int) -> None:
        self._app = app
        self._key = key
        self._most = most
        self._sessions: dict[str, _ToolServerSession] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        refusal = self._refusal(headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        name = headers.get(SESSION, b"").decode("latin-1")
        if not name and len(self._sessions) >= self._most:
            await self._make_room(scope)

        await self._pass_on(scope, receive, send, name)

    async def _pass_on(self, scope: Any, receive: Any, send: Any, name: str) -> None:
        """Passes a request to the application, and reads the session's state from the response."""
        is_stream = scope["method"] == "GET"
        session = self._sessions.get(name)
        if session is not None:
            session.running += 1
            session.is_gone = False

        status = 0

        async def send_and_note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = dict(message.get("headers", ()))
                if not name and status < 400 and (new := response_headers.get(SESSION.encode())):
                    self._sessions[new.decode("latin-1")] = _ToolServerSession(time.monotonic())
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if session is not None:
                session.running -= 1
                session.used = time.monotonic()
                session.is_gone = is_stream and status < 400 and not session.running
            if status == 404 or (scope["method"] == "DELETE" and status < 400):
                self._sessions.pop(name, None)

    async def _make_room(self, scope: Any) -> None:
        """Ends a session without a waiting client, if there is one."""
        while len(self._sessions) >= self._most:
            now = time.monotonic()
            idle = {
                name: now - session.used + (SILENT_S if session.is_gone else 0.0)
                for name, session in self._sessions.items()
                if not session.running
                and now - session.used >= (GONE_S if session.is_gone else SILENT_S)
            }
            if not idle:
                return

            name = max(idle, key=lambda session_name: idle[session_name])
            del self._sessions[name]
            await self._end(name, scope)

    async def _end(self, name: str, scope: Any) -> None:
        """Ends the session in the way that its client would. `scope`: that of the request that
        needs the place."""
        kept_headers = [
            header
            for header in scope["headers"]
            if header[0] in (b"host", b"origin", b"authorization")
        ]
        delete_scope = {
            **scope,
            "method": "DELETE",
            "headers": [*kept_headers, (SESSION.encode(), name.encode())],
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            return

        await self._app(delete_scope, receive, send)

    def _refusal(self, headers: Mapping[str, bytes]) -> JSONResponse | None:
        from mcp_types import INVALID_REQUEST, UNSUPPORTED_PROTOCOL_VERSION
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        if self._key is not None:
            shown = headers.get("authorization", b"")
            if not hmac.compare_digest(shown, f"Bearer {self._key}".encode()):
                why = "the key is missing or wrong: Authorization: Bearer KEY"
                return _error(401, INVALID_REQUEST, why)

        version = headers.get("mcp-protocol-version", b"").decode("latin-1")
        if version and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            supported = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version[:60]}
            why = "only protocol revisions with sessions are supported here"
            return _error(400, UNSUPPORTED_PROTOCOL_VERSION, why, supported)

        return None


def _error(status: int, code: int, message: str, data: Any = None) -> JSONResponse:
    error = {"code": code, "message": message, **({} if data is None else {"data": data})}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status)
