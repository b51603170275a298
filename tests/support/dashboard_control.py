"""A dashboard that may change something, without a socket, and what a browser sends to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentevo.runs.folder.sources import Sources
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.access import Access
from agentevo_ui.app import make_app

TOKEN = "the-token-of-the-tests"
CONTROL = "the-control-token-of-the-tests"
ORIGIN = {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-origin"}


@asynccontextmanager
async def changing(folder: Path, *, control: str | bool = CONTROL) -> AsyncIterator[Any]:
    """A client of the dashboard over that folder, which may be changed; without a cookie yet."""
    guard, shared = make_app(Sources([str(folder)]), Access(token=TOKEN, control=control))
    transport = httpx.ASGITransport(app=guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        try:
            yield client
        finally:
            await shared.watcher.close()
            await shared.stores.close()
            await in_thread(shared.indexes.close)


async def form_token(client: httpx.AsyncClient) -> str:
    """What the forms of this dashboard have: it comes from a page, as the browser's does."""
    known = Access(token=TOKEN, control=CONTROL)
    await client.get("/", params={"control": CONTROL})
    return known.visitor(f"{known.control_cookie}={known._control_pass}", "").form_token
