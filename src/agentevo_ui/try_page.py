"""Tries a run: `/runs/{run}/try` to chat with its checkpoints. The page's script sends requests to
`/chat` below it, whose answer is a stream, and to `/end`.

    event: state   {"text": ..., "ready": true}   the player's activity
    event: text    {"text": ...}                  more of a reply
    event: reply   {"text": ..., "html": ...}     the end of a reply: its whole text, its tokens
    event: failed  {"text": ...}
    event: done    {}

The script sends the fields of a form (access.py). The conversation exists only in the page, and the
dashboard does not store it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentevo.errors import describe_error
from agentevo.observability.attempt_tokens import TurnTokens
from agentevo.observability.pages import render
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.evaluation import player_words as words
from agentevo.runs.folder.checkpoint_list import KeptCheckpoints, kept_checkpoints
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Message
from agentevo_ui.context import dashboard, form_of, part, run_of, visitor
from agentevo_ui.players import PlayerError, PlayerKey, PlayerProcess
from agentevo_ui.run_page import run_page

router = APIRouter()

DEVICES = ("", "cpu")
MAX_STREAMS = 8
WITHIN_S = 60.0
ROLES = ("system", "user", "assistant")


@router.get("/runs/{run}/try", response_class=HTMLResponse)
async def try_it(request: Request, run: str) -> HTMLResponse:
    """The page."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        choices = await _choices(view)

    return run_page(
        request,
        "try.html",
        view,
        "try",
        choices=choices,
        temperature=_number(view.setting("sampling", "temperature"), 1.0),
        max_tokens=int(_number(view.setting("sampling", "max_new_tokens"), 256)),
        players=dashboard(request).players.of(view.key),
        limits=words,
    )


@router.get("/runs/{run}/try/players", response_class=HTMLResponse)
async def players(request: Request, run: str) -> HTMLResponse:
    """The loaded checkpoints."""
    view = await run_of(request, run)
    loaded = dashboard(request).players.of(view.key)
    return part("try_players.html", view=view, players=loaded, visitor=visitor(request))


@router.post("/runs/{run}/try/end")
async def end(request: Request, run: str) -> Response:
    """Ends a player, which frees its memory."""
    view = await run_of(request, run)
    player_pool = dashboard(request).players
    for player in player_pool.of(view.key):
        if str(player.process.pid) == form_of(request).get("pid", ""):
            await player_pool.end(player, "a user stopped it")
    return RedirectResponse(run_url(view.key, "try"), status_code=303)


@router.post("/runs/{run}/try/chat")
async def chat(request: Request, run: str) -> Response:
    """A reply, streamed while it is sampled."""
    view = await run_of(request, run)
    form = form_of(request)
    try:
        raw_messages = json.loads(form.get("messages", "[]"))
        messages = [
            Message(entry["role"], entry["content"])
            for entry in raw_messages
            if entry["role"] in ROLES and isinstance(entry["content"], str)
        ]
        length = sum(len(message.text) for message in messages)

        for message in messages:
            message.text.encode()  # half of a pair of surrogates is not a text
    except (ValueError, TypeError, KeyError, RecursionError):
        return _refusal("these are not messages")

    if length > words.MAX_CHARACTERS:
        return _refusal(
            f"the conversation has {length:,} characters, at most {words.MAX_CHARACTERS:,} are "
            "accepted: write less, or start a new one"
        )

    if not messages or messages[-1].role != "user" or not messages[-1].text.strip():
        return _refusal("there is nothing to answer: write a message")

    fields = {
        "type": "chat",
        "id": secrets.token_hex(8),
        "conversation": form.get("conversation", ""),
        "messages": msgspec.to_builtins(messages),
        "temperature": form.get("temperature", "1"),
        "max_new_tokens": form.get("max_new_tokens", "256"),
    }
    try:
        query = msgspec.convert(fields, words.Chat, strict=False)
    except msgspec.ValidationError as error:
        return _refusal(f"this request is not valid: {error}")

    folder = view.source.folder
    async with asyncio.timeout(WITHIN_S):
        choices = await _choices(view)

    which = form.get("which", "")
    device = form.get("device", "")
    if folder is None or device not in DEVICES or which not in choices.names:
        return _refusal(f"the run has no checkpoint {which[:60]!r} (any more): load the page again")
    if which == words.START and choices.missing:
        return _refusal(choices.missing)

    return TryEventStream(request, view, PlayerKey(folder, which, device), query)


def _refusal(text: str, status: int = 422) -> Response:
    return Response(json.dumps({"text": text}), status, media_type="application/json")


async def _choices(view: RunView) -> KeptCheckpoints:
    """The checkpoints that can be tried."""
    return await in_thread(kept_checkpoints, view.source.folder or Path(), view.config)


def _number(value: Any, otherwise: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e6 else otherwise


class TryEventStream(Response):
    """The stream of a request. It ends, and cancels the request, when the browser is gone."""

    def __init__(self, request: Request, view: RunView, key: PlayerKey, query: words.Chat) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        self._shared = dashboard(request)
        self._view = view
        self._key = key
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._shared.players.streams >= MAX_STREAMS:
            refused = _refusal("too many requests at once: wait until some are done", 429)
            await refused(scope, receive, send)
            return

        self._shared.players.streams += 1  # no await between the check and this line
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._shared.players.streams -= 1
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            events = self._shared.players.ask(self._key, self._view.key, self._query)
            async with aclosing(events) as stream:
                async for event in stream:
                    for name, data in self._shown(event):
                        await _send_event(send, name, data)
        except PlayerError as error:
            await _send_event(send, "failed", {"text": str(error)})
        except OSError:  # the browser no longer accepts the answer; also TimeoutError
            raise
        except Exception as error:  # noqa: BLE001 (reported where the dashboard was started)
            to_stderr(f"ui: try {self._view.key}: {describe_error(error)}")
            text = "This failed. The terminal of `agentevo ui` shows the reason."
            await _send_event(send, "failed", {"text": text})

        await _send_event(send, "done", {})
        await send({"type": "http.response.body", "body": b""})

    def _shown(self, event: words.Event | PlayerProcess) -> list[tuple[str, Mapping[str, Any]]]:
        if isinstance(event, PlayerProcess):
            text = render("try_state.html", player=event).strip()
            return [("state", {"html": text, "ready": event.state == "ready"})]

        if isinstance(event, words.Text):
            return [("text", {"text": event.text})]
        if isinstance(event, words.FailedChat):
            return [("failed", {"text": event.error})]

        if isinstance(event, words.Replied):
            tokens = TurnTokens([event.tokens], None)
            html = render(
                "try_reply.html",
                view=self._view,
                event=event,
                one={"id": ""},
                leaf=None,
                tokens={"turn_tokens": tokens},
            )
            return [("reply", {"text": event.text, "html": html})]

        return []


async def _send_event(send: Send, name: str, data: Mapping[str, Any]) -> None:
    body = f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Waits until the listener is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
