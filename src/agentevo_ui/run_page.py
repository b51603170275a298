"""A run: `/runs/{run}` (its current activity) and `/config` below it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.observability import run_now
from agentevo.observability.chart_lines import MAIN, chart_of
from agentevo.observability.pages.navigation import TABS
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import read_text
from agentevo_ui import process_files
from agentevo_ui.context import NotFoundError, dashboard, is_part, page, part, run_of
from agentevo_ui.runs_page import row_of

router = APIRouter()

SHOWN_WARNINGS = 20


@router.get("/runs/{run}", response_class=HTMLResponse)
async def now(request: Request, run: str) -> HTMLResponse:
    """The page with the current activity."""
    view = await run_of(request, run)
    charts = [chart for name in MAIN if (chart := chart_of(view, name))]

    return run_page(
        request,
        "run.html",
        view,
        "now",
        row=row_of(view),
        charts=charts,
        facts=run_now.facts(view),
        left=run_now.seconds_left(view),
        warnings=view.warnings[:SHOWN_WARNINGS],
        failures=run_now.counts_below(view, "rollout/failed/"),
        drops=run_now.counts_below(view, "rollout/dropped/"),
        shares=run_now.time_shares(view),
        plays=view.command not in ("sft", "rm"),
    )


@router.get("/runs/{run}/work", response_class=HTMLResponse)
async def work(request: Request, run: str) -> HTMLResponse:
    """The work of the run: a part of the page."""
    view = await run_of(request, run)
    if not is_part(request):
        raise NotFoundError("This is a part of the page Now.")
    engines = await in_thread(process_files.engines, view.source)
    return part(
        "run_work.html",
        view=view,
        work=await dashboard(request).works.of(view),
        engines=[engine for engine in engines if engine.lives],
        published=await in_thread(process_files.weights, view.source),
    )


@router.get("/runs/{run}/config", response_class=HTMLResponse)
async def config(request: Request, run: str) -> HTMLResponse:
    """config.yaml as written."""
    view = await run_of(request, run)
    path = view.source.file("config.yaml")
    if path is None:
        raise NotFoundError("This run has no config.yaml here: only its store is known.")
    return run_page(request, "config.html", view, "config", text=await in_thread(read_text, path))


def run_page(request: Request, template: str, view: RunView, tab: str, **data: Any) -> HTMLResponse:
    """A page of a run, with its heading and tabs. `tab`: the name of the page's tab in TABS."""
    pipeline = dashboard(request).sources.pipeline_of(view.source)
    facts: dict[str, Any] = {"view": view, "tab": tab, "tabs": TABS, "pipeline": pipeline}
    return page(request, template, news=[view.key], **facts, **data)
