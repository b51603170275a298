"""Sessions over HTTP whose clients have vanished make room for others, and no others do."""

from __future__ import annotations

import asyncio

import pytest

from agentevo.agents.tool_servers import session_limiter
from agentevo.agents.tool_servers.session_limiter import SessionLimiter
from agentevo.runtime.event_loop import run_coroutine

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
MOST = 3


class Sessions:
    """The SDK's application as far as sessions go: room for MOST of them."""

    def __init__(self):
        self.open = []
        self.made = 0
        self.hold = asyncio.Event()

    async def __call__(self, scope, receive, send):
        headers = dict(scope["headers"])
        name = headers.get(b"mcp-session-id", b"").decode()
        told = []
        if not name:
            status = 200 if len(self.open) < MOST else 503
            if status == 200:
                self.made += 1
                self.open.append(f"s{self.made}")
                told = [(b"mcp-session-id", self.open[-1].encode())]
        else:
            status = 200 if name in self.open else 404

        if scope["method"] == "DELETE" and status == 200:
            self.open.remove(name)

        await send({"type": "http.response.start", "status": status, "headers": told})
        if scope["method"] == "GET":
            await self.hold.wait()

        await send({"type": "http.response.body", "body": b""})


async def asked(app, method="POST", session=None, key="k"):
    heard = []

    async def send(message):
        heard.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"h")]
    headers += [(b"mcp-session-id", session.encode())] if session else []
    scope = {"type": "http", "method": method, "path": "/mcp", "headers": headers}
    await app(scope, None, send)
    return heard[0]["status"]


def with_fake_clock(work, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session_limiter.time, "monotonic", lambda: now[0])

    async def all_of_it():
        sessions = Sessions()
        app = SessionLimiter(sessions, "k", MOST)
        for _ in range(MOST):
            assert await asked(app) == 200
        await work(app, sessions, now)

    run_coroutine(all_of_it())


def test_a_session_that_asks_nothing_makes_room_and_the_most_silent_first(monkeypatch):
    async def work(app, sessions, now):
        now[0] = session_limiter.SILENT_S - 1
        assert await asked(app) == 503, "they may only be thinking"
        assert await asked(app, session="s1") == 200

        now[0] = session_limiter.SILENT_S + 10
        assert await asked(app) == 200
        assert sessions.open == ["s1", "s3", "s4"]
        assert await asked(app, session="s2") == 404, "as an unknown one"
        assert await asked(app, key="other") == 401

    with_fake_clock(work, monkeypatch)


def test_who_waits_keeps_the_place_and_who_is_gone_loses_it_soon(monkeypatch):
    async def work(app, sessions, now):
        streams = [asyncio.ensure_future(asked(app, "GET", f"s{n}")) for n in (1, 2)]
        await asyncio.sleep(0)
        now[0] = session_limiter.SILENT_S * 9
        assert await asked(app) == 200 and sessions.open == ["s1", "s2", "s4"], "s3 has no stream"

        streams[1].cancel()  # as its client vanishes
        await asyncio.wait(streams[1:])
        assert await asked(app) == 503

        now[0] += session_limiter.GONE_S
        assert await asked(app) == 200 and sessions.open == ["s1", "s4", "s5"]

        sessions.hold.set()
        await streams[0]
        assert await asked(app, "DELETE", "s1") == 200
        assert await asked(app) == 200 and sessions.open == ["s4", "s5", "s6"]

    with_fake_clock(work, monkeypatch)
