"""Limits that hold however many ask at once, and confirmations that count one time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dashboard_control import TOKEN

from agentevo.runs.folder.sources import Sources
from agentevo_ui import live
from agentevo_ui.access import Access
from agentevo_ui.app import make_app
from agentevo_ui.confirmations import MAX_CONFIRMATIONS, Confirmations


def test_streams_are_counted_as_they_are_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 5)
    known = Access(token=TOKEN)

    async def statuses() -> list[int]:
        app, shared = make_app(Sources([str(tmp_path)]), known)
        found: list[int] = []
        over = asyncio.Event()

        async def ask() -> None:
            async def receive() -> dict[str, Any]:
                await over.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    found.append(message["status"])
                await asyncio.sleep(0.0)

            cookie = f"{known.cookie}={known._pass}".encode()
            headers = [(b"host", b"127.0.0.1:1"), (b"cookie", cookie)]
            scope = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live"}
            more = {"query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
            await app({**scope, **more}, receive, send)

        async with asyncio.timeout(300.0):
            asking = [asyncio.ensure_future(ask()) for _ in range(40)]
            while len(found) < 40:
                await asyncio.sleep(0.01)
            over.set()
            await asyncio.gather(*asking)

        assert shared.watcher.num_streams == 0

        await shared.watcher.close()
        await shared.stores.close()
        return found

    assert sorted(asyncio.run(statuses())) == [200] * 5 + [503] * 35


def test_a_confirmation_covers_what_was_shown_and_is_used_once() -> None:
    known = Confirmations()
    id = known.add("lake", "stop", "session-1")
    assert known.covers(id, "lake", "stop", "session-1")
    for other in [("lake", "pause", "session-1"), ("lake", "stop", "session-2"), ("sea",), ()]:
        assert not known.covers(id, *other)
    assert not known.covers("", "lake", "stop", "session-1")
    assert [known.use(id), known.use(id)] == [True, False]

    known.withdraw(id)  # what was asked has failed
    assert not known.covers(id, "lake", "stop", "session-1")


def test_the_oldest_confirmations_are_forgotten() -> None:
    known = Confirmations()
    first, *_, last = [known.add("lake", "stop") for _ in range(MAX_CONFIRMATIONS + 1)]
    assert not known.covers(first, "lake", "stop") and known.covers(last, "lake", "stop")
    assert len(known._shown) == MAX_CONFIRMATIONS
