"""A pipeline: `/pipelines/{key}`. The page shows its stages, the gain of each on the held-out
tasks, and its progress. A stage that is a run links to that run's page. Only pipeline.json is
read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.sources import HELD_OUT, Sources
from agentevo.runtime.console import format_duration
from agentevo.runtime.event_loop import in_thread
from agentevo_evolve.pipeline.plan import START
from agentevo_evolve.pipeline.results import StageRow, stage_rows
from agentevo_evolve.pipeline.state import PipelineState, read_state
from agentevo_ui.context import NotFoundError, dashboard, page

router = APIRouter()

REPORT = "report.html"


class ShownPipeline(NamedTuple):
    """The content of the page."""

    state: PipelineState
    rows: list[StageRow]
    urls: dict[str, str]
    """URLs of the runs of stages."""
    measured: dict[str, str]
    """URLs of the results on the held-out tasks, by stage."""
    report: Path | None
    """The pipeline's report, after the pipeline has ended. With several seeds, it is next to their
    folders."""

    @property
    def now(self) -> list[str]:
        """The running stages, including measurements."""
        names = [name for name, stage in self.state.stages.items() if stage.status == "running"]
        return [f"measures {name.partition('@')[0]}" if "@" in name else name for name in names]


@router.get("/pipelines/{key}", response_class=HTMLResponse)
async def pipeline(request: Request, key: str) -> HTMLResponse:
    """A pipeline with a single seed."""
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
            *([("now", ", ".join(shown.now), "")] if shown.now else []),
        ],
        is_running=state.status == "running",
        rows=shown.rows,
        urls=shown.urls,
        measured=shown.measured,
        report="" if shown.report is None else str(shown.report),
    )


def _read(sources: Sources, folder: Path) -> ShownPipeline:
    """Raises ConfigError for a damaged file."""
    state = read_state(folder)
    keys = {source.folder: source.key for source in sources.runs().values()}
    urls = {
        name: run_url(keys[place])
        for name in state.stages
        if (place := folder / "stages" / name) in keys
    }
    results = {place: key for key, place in sources.results().items()}
    measured = {
        name: f"/results/{quote(results[place], safe='~+=,@')}"
        for name in [START, *state.stages]
        if (place := folder / HELD_OUT / name) in results
    }
    rows = stage_rows([state]) if state.stages else []
    places = (folder / REPORT, folder.parent / REPORT)
    report = next((candidate for candidate in places if candidate.is_file()), None)
    return ShownPipeline(state, rows, urls, measured, report)
