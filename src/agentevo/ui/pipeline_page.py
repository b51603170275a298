"""A pipeline: `/pipelines/{key}`. Its stages, what each has gained on the held-out tasks, and where
it stands; a stage that is a run leads to that run's page. Only pipeline.json is read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.console import format_duration
from agentevo.event_loop import in_thread
from agentevo.pages.navigation import run_url
from agentevo.pipeline.results import StageRow, stage_rows
from agentevo.pipeline.state import PipelineState, read_state
from agentevo.ui.context import NotFoundError, dashboard, page
from agentevo.ui.sources import Sources

router = APIRouter()


class Shown(NamedTuple):
    """What the page says."""

    state: PipelineState
    rows: list[StageRow]
    urls: dict[str, str]


@router.get("/pipelines/{key}", response_class=HTMLResponse)
async def pipeline(request: Request, key: str) -> HTMLResponse:
    """One pipeline with one seed."""
    sources = dashboard(request).sources
    folder = (await in_thread(sources.pipelines)).get(key)
    if folder is None:
        raise NotFoundError(f"There is no pipeline {key} in {sources.shown}.")
    shown = await in_thread(lambda: _read(sources, folder))
    state = shown.state
    return page(
        request,
        "pipeline.html",
        name=key.replace("~", "/"),
        here=f"/pipelines/{quote(key, safe='~+=,@')}",
        facts=[
            ("state", state.status, ""),
            ("seed", str(state.seed), ""),
            ("time", format_duration(state.wall_s), ""),
            ("tokens", f"{state.tokens:,}", ""),
        ],
        is_running=state.status == "running",
        rows=shown.rows,
        urls=shown.urls,
    )


def _read(sources: Sources, folder: Path) -> Shown:
    """Raises ConfigError for a file that was damaged."""
    state = read_state(folder)
    keys = {source.folder: source.key for source in sources.runs().values()}
    urls = {
        name: run_url(keys[place])
        for name in state.stages
        if (place := folder / "stages" / name) in keys
    }
    return Shown(state, stage_rows([state]) if state.stages else [], urls)
