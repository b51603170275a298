"""`/runs/{run}/control`: the changes of a run with their authors, and buttons that request it to
stop, save, pause or resume, for visitors with control.

A button leads to a page that says what will happen. Only the form of that page sends a request to
the run, and only once, even if the form is sent again (confirmations.py). access.py checks
a request before it arrives here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.control import ACTIONS, Action, ControlSession, ask, session_of
from agentevo.runs.folder.records import CHANGES, add_record, read_records
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.access import Visitor
from agentevo_ui.context import NotFoundError, dashboard, form_of, page, run_of, visitor
from agentevo_ui.run_page import run_page

router = APIRouter()
WRITE_S = 10.0
"""The deadline of an access to the disk, in seconds."""
MAX_RECORDS = 200
"""The maximum number of changes on the page."""
ABOUT = ("at", "who", "address", "id", "what")
"""The keys of every record. Its other keys are details."""
BUTTONS: dict[Action, tuple[str, str]] = {
    "stop": (
        "Stop",
        "It ends after its current step, or during an evaluation, as with SIGTERM: "
        "every committed step is kept, and a checkpoint is saved.",
    ),
    "save": (
        "Save now",
        "After its current step, it saves a checkpoint. Older ones are deleted as the recipe says "
        "(checkpoint.keep_last).",
    ),
    "pause": (
        "Pause",
        "After its current step, it waits until someone resumes it. It keeps its memory, its GPU "
        "and its processes.",
    ),
    "resume": ("Resume", "It continues with the next step."),
}
"""Maps an action to (label of its button, what will happen)."""


async def _session(view: RunView) -> tuple[ControlSession | None, str]:
    folder = view.source.folder
    if folder is None:
        return None, "this run's folder is not here, only its store"
    async with asyncio.timeout(WRITE_S):
        return await in_thread(session_of, folder, view.state)


async def _records(folder: Path | None) -> Sequence[dict[str, Any]]:
    """The newest changes of a run, the newest first."""
    if folder is None:
        return []
    async with asyncio.timeout(WRITE_S):
        return (await in_thread(read_records, folder / CHANGES))[: -MAX_RECORDS - 1 : -1]


@router.get("/runs/{run}/control", response_class=HTMLResponse)
async def control(request: Request, run: str) -> HTMLResponse:
    """The changes of this run, and the requests that it accepts."""
    view = await run_of(request, run)
    session, why = await _session(view)
    rows = [
        {
            **{key: record.get(key) for key in ABOUT},
            "at": at if isinstance(at := record.get("at"), int | float) else None,
            "more": ", ".join(f"{key} {text}" for key, text in record.items() if key not in ABOUT),
        }
        for record in await _records(view.source.folder)
    ]
    is_paused = session is not None and session.is_paused
    offered = [do for do in ACTIONS if do != ("pause" if is_paused else "resume")]

    return run_page(
        request,
        "control.html",
        view,
        "control",
        records=rows,
        session=session,
        why=why,
        buttons=[(do, BUTTONS[do][0]) for do in offered],
    )


@router.post("/runs/{run}/control")
async def ask_run(request: Request, run: str) -> Response:
    """Sends a request to the run after it is confirmed."""
    view = await run_of(request, run)
    form = form_of(request)
    url = run_url(view.key, "control")

    action = next((name for name in ACTIONS if name == form.get("do")), None)
    if action is None:
        raise NotFoundError(f"A run can {', '.join(ACTIONS)}.")

    session, why = await _session(view)
    folder = view.source.folder
    if session is None or folder is None:
        raise NotFoundError(f"No request was sent: {why}.")

    # A confirmation is valid for the process that ran when the page was shown.
    if form.get("session", session.id) != session.id:
        raise NotFoundError("No request was sent: another process trains this run now.")

    id = form.get("id", "")
    confirmations = dashboard(request).confirmations
    if not confirmations.covers(id, view.key, action, session.id):
        title, text = BUTTONS[action]
        if action == "stop" and view.resume_command:
            text += f" `{view.resume_command}` resumes it."

        return page(
            request,
            "confirm.html",
            title=title,
            label=view.label,
            text=text,
            url=url,
            do=action,
            session=session.id,
            id=confirmations.add(view.key, action, session.id),
        )

    if confirmations.use(id):
        try:
            async with asyncio.timeout(WRITE_S):
                await in_thread(_record_and_ask, folder, action, id, session.id, visitor(request))
        except BaseException:
            confirmations.withdraw(id)
            raise

    return RedirectResponse(url, status_code=303)


def _record_and_ask(folder: Path, action: Action, id: str, session: str, by: Visitor) -> None:
    """Raises ConfigError, and sends no request, if the folder can't be written."""
    record = {"at": time.time(), "who": by.who, "address": by.address, "id": id}
    add_record(folder / CHANGES, {**record, "what": f"{action}: asked"})
    ask(folder, action, id=id, session=session, who=by.who)
