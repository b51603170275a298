"""One run's changes: `/runs/{run}/control` shows what was changed in it, and by whom."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.ui.changes import records_of
from agentevo.ui.context import run_of
from agentevo.ui.run_page import run_page

router = APIRouter()
ABOUT = ("at", "who", "address", "id", "what")
"""The keys of every record; a record's others say more about it."""


@router.get("/runs/{run}/control", response_class=HTMLResponse)
async def control(request: Request, run: str) -> HTMLResponse:
    """What was changed in this run."""
    view = await run_of(request, run)
    rows = [
        {
            **{key: record.get(key) for key in ABOUT},
            "at": at if isinstance(at := record.get("at"), int | float) else None,
            "more": ", ".join(f"{key} {text}" for key, text in record.items() if key not in ABOUT),
        }
        for record in await records_of(view.source.folder)
    ]
    return run_page(request, "control.html", view, "control", records=rows)
