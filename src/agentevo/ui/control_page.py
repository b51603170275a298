"""`/runs/{run}/control`: what was changed in a run and by whom, and buttons that ask it to stop,
save, pause or go on, for who may."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from agentevo.event_loop import in_thread
from agentevo.pages.navigation import run_url
from agentevo.runs.control import ACTIONS, ControlSession, ask
from agentevo.ui.asking import session_of
from agentevo.ui.changes import WRITE_S, ask_again, changes, records_of, see
from agentevo.ui.context import NotFoundError, run_of
from agentevo.ui.run_page import run_page
from agentevo.ui.run_state import RunView

router = APIRouter()
ABOUT = ("at", "who", "address", "id", "what")
"""The keys of every record; a record's others say more about it."""
ASKED = {
    "stop": (
        "Stop",
        "It ends after the step that it is in, or within its evaluation, as SIGTERM ends it: "
        "every committed step is kept, and a checkpoint is saved.",
    ),
    "save": (
        "Save now",
        "After the step that it is in it saves a checkpoint; older ones are deleted as the recipe "
        "says (checkpoint.keep_last).",
    ),
    "pause": (
        "Pause",
        "After the step that it is in it stands still until somebody resumes it. It keeps its "
        "memory, its GPU and its processes.",
    ),
    "resume": ("Resume", "It goes on with the next step."),
}
"""Action -> (words of its button, what will happen)."""


async def _session(view: RunView) -> tuple[ControlSession | None, str]:
    folder = view.source.folder
    if folder is None:
        return None, "this run is known by its store alone"
    async with asyncio.timeout(WRITE_S):
        return await in_thread(session_of, folder, view.state)


@router.get("/runs/{run}/control", response_class=HTMLResponse)
async def control(request: Request, run: str) -> HTMLResponse:
    """What was changed in this run, and what it may be asked for."""
    view = await run_of(request, run)
    session, why = await _session(view)
    rows = [
        {
            **{key: record.get(key) for key in ABOUT},
            "at": at if isinstance(at := record.get("at"), int | float) else None,
            "more": ", ".join(f"{key} {text}" for key, text in record.items() if key not in ABOUT),
        }
        for record in await records_of(view.source.folder)
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
        buttons=[(do, ASKED[do][0]) for do in offered],
    )


@router.post("/runs/{run}/control")
async def change_run(request: Request, run: str) -> Response:
    """Asks the run for something, once that is confirmed."""
    view = await run_of(request, run)
    change = changes(request)
    do = change.get("do")
    back = run_url(view.key, "control")

    action = next((one for one in ACTIONS if one == do), None)
    if action is None:
        raise NotFoundError(f"A run can {', '.join(ACTIONS)}.")

    session, why = await _session(view)
    folder = view.source.folder
    if session is None or folder is None:
        raise NotFoundError(f"Nothing was asked: {why}.")

    # What was confirmed is meant for the process that ran when it was asked.
    if change.get("session", session.id) != session.id:
        raise NotFoundError("Nothing was asked: another process trains this run by now.")

    title, text = ASKED[action]
    if action == "stop" and view.resume_command:
        text += f" `{view.resume_command}` goes on with it."

    if not change.is_sure:
        return ask_again(
            request, change, f"{title}: {view.label}?", text, back=back, do=f"{title}, really"
        )

    async def ask_run() -> str:
        await change.record(view, f"{action}: asked")
        who = change.visitor.who
        async with asyncio.timeout(WRITE_S):
            await in_thread(lambda: ask(folder, action, id=change.id, session=session.id, who=who))
        return back

    return see(await change.once(ask_run))
