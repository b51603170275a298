"""Every metric of a run, `/runs/{run}/metrics`, and the numbers of a metric as JSON,
`/runs/{run}/series`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from agentevo.observability.chart_lines import NAMES, Axis, chart_of
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.context import NotFoundError, chart_json, is_part, part, run_of
from agentevo_ui.run_page import run_page

router = APIRouter()

MAX_SHOWN = 400
"""The maximum number of charts on a page."""


@dataclass(frozen=True)
class ShownMetrics:
    """A metric on the page."""

    name: str
    latest: float | None
    url: str


@router.get("/runs/{run}/metrics", response_class=HTMLResponse)
async def metrics(
    request: Request, run: str, q: str = "", x: Axis = "step", smooth: float = 0.0
) -> HTMLResponse:
    """All metrics by their names, searched."""
    view = await run_of(request, run)
    names = [name for name in sorted(view.table.columns) if _is_like(name, q)]
    groups: dict[str, list[ShownMetrics]] = {}
    for name in names[:MAX_SHOWN]:
        groups.setdefault(name.partition("/")[0], []).append(_shown(view, name, x))

    data = {
        "groups": groups,
        "q": q,
        "x": x,
        "axes": NAMES,
        "smooth": min(max(smooth, 0.0), 0.99),
        "num_left_out": max(len(names) - MAX_SHOWN, 0),
        "total": len(view.table.columns),
        "num_new": 0,
    }
    if is_part(request):
        return part("metrics_list.html", view=view, **data)

    return run_page(request, "metrics.html", view, "metrics", **data)


@router.get("/runs/{run}/metrics/new", response_class=HTMLResponse)
async def new_metrics(
    request: Request, run: str, num_seen: Annotated[int, Query(alias="seen", ge=0, le=10**9)]
) -> HTMLResponse:
    """The number of metrics that the run has in addition to those of an open page, such as those of
    its first evaluation."""
    view = await run_of(request, run)
    num_new = max(len(view.table.columns) - num_seen, 0)
    return part("metrics_new.html", view=view, total=num_seen, num_new=num_new)


@router.get("/runs/{run}/series")
async def series(request: Request, run: str, metric: str, x: Axis = "step") -> Response:
    """The numbers of a metric, in the form for charts.js."""
    view = await run_of(request, run)
    chart = await in_thread(chart_of, view, metric, x)
    if chart is None:
        raise NotFoundError(f"This run has logged no {metric[:100]}.")
    return chart_json(chart)


def _is_like(name: str, q: str) -> bool:
    return all(word in name.lower() for word in q.lower().split())


def _shown(view: RunView, name: str, x: Axis) -> ShownMetrics:
    url = f"{run_url(view.key, 'series')}?{urlencode({'metric': name, 'x': x})}"
    return ShownMetrics(name, view.table.latest(name), url)
