"""Server-sent events: `GET /live?run=KEY&run=...` reports each change of these runs.

    event: run
    data: {"run": "coins", "version": 12, "step": 8, "state": "running", "at": 1795473961.2,
           "now": {"words": "sampling, step 9: 37 of 64 attempts", "share": 0.58, "since": ...}}

The key `*` means the list of runs: `{"run": "*", "version": 3}` if the list has changed.

A page requests its parts again at a new version, so the selection of its URL (filters, a metric)
stays. The page itself shows what the run does now, about once a second. An empty comment line comes
every HEARTBEAT_S seconds, so that a client that is gone is detected. A stream ends after
MAX_STREAM_S seconds, and browsers reopen it automatically.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentevo.observability.pages.text import one_line, shown
from agentevo.runs.folder.run_state import RunView
from agentevo_ui.context import dashboard
from agentevo_ui.run_watcher import LIST, Watcher

HEARTBEAT_S = 15.0
MAX_STREAM_S = 3600.0
MAX_STREAMS = 200
MAX_ACTIVITY_CHARS = 160
MAX_REASON_CHARS = 2000
MAX_RUNS = 501
"""The maximum number of runs of a stream."""

router = APIRouter()


@router.get("/live", include_in_schema=False)
async def live(request: Request) -> Response:
    """The stream of changes of the requested runs."""
    watcher = dashboard(request).watcher
    keys = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_RUNS]
    return Events(request, watcher, keys)


class Events(StreamingResponse):
    """The stream, if fewer than MAX_STREAMS are open when it starts."""

    def __init__(self, request: Request, watcher: Watcher, keys: list[str]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        events = _events(request, watcher, keys)
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._watcher.num_streams >= MAX_STREAMS:
            text = "too many pages are open: close some\n"
            await PlainTextResponse(text, status_code=503)(scope, receive, send)
            return

        self._watcher.num_streams += 1  # no await between the check and this line
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watcher.num_streams -= 1


async def _events(request: Request, watcher: Watcher, keys: list[str]) -> AsyncIterator[bytes]:
    ends = time.monotonic() + MAX_STREAM_S
    beat = time.monotonic()
    yield b"retry: 1000\n\n"

    async for view in watcher.news(keys):
        now = time.monotonic()
        if isinstance(view, int):
            yield f"event: run\ndata: {json.dumps({'run': LIST, 'version': view})}\n\n".encode()
            beat = now
        elif view is not None:
            yield _event_of(watcher, view)
            beat = now
        elif now - beat > HEARTBEAT_S:
            yield b": still here\n\n"
            beat = now

        if now > ends or (view is None and await _is_gone(request)):
            return


def _event_of(watcher: Watcher, view: RunView) -> bytes:
    """The event, made once for all its listeners, because a view never changes."""
    cached = watcher.events.get(view.key)
    if cached is not None and cached[0] is view:
        return cached[1]

    fields = {
        "run": view.key,
        "version": view.version,
        "step": view.step,
        "state": view.badge,
        "why": shown(view.reason, MAX_REASON_CHARS),
        "at": round(time.time(), 3),
        "now": _doing(view),
    }
    event = f"event: run\ndata: {json.dumps(fields)}\n\n".encode()
    watcher.events[view.key] = (view, event)

    return event


def _doing(view: RunView) -> dict[str, object] | None:
    if (moment := view.doing) is None or view.is_silent:
        return None
    words = one_line(moment.words(), MAX_ACTIVITY_CHARS)
    return {"words": words, "share": moment.share(), "since": moment.since}


async def _is_gone(request: Request) -> bool:
    try:
        async with asyncio.timeout(1.0):
            return await request.is_disconnected()
    except TimeoutError:
        return False
