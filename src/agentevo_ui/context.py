"""What the handlers of all pages share: the run of a URL, the visitor, and rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from agentevo.observability.pages import render
from agentevo.observability.pages.charts import Chart
from agentevo.observability.pages.embedded_json import as_json
from agentevo.runs.folder.run_state import RunView
from agentevo.runs.folder.sources import Sources
from agentevo_ui.access import FORM, VISITOR, Visitor
from agentevo_ui.confirmations import Confirmations
from agentevo_ui.index.indexer import Indexes
from agentevo_ui.players import Players
from agentevo_ui.run_watcher import Watcher
from agentevo_ui.shared_answers import THEME, THEMES
from agentevo_ui.stores import Stores
from agentevo_ui.work import Works


@dataclass(frozen=True)
class Dashboard:
    """The shared state of a dashboard's pages: `request.app.state.dashboard`."""

    sources: Sources
    watcher: Watcher
    stores: Stores
    indexes: Indexes
    works: Works
    players: Players
    confirmations: Confirmations


class NotFoundError(Exception):
    """A URL names something that does not exist. The message says what."""


def dashboard(request: Request) -> Dashboard:
    """The dashboard of the request's application."""
    shared: Dashboard = request.app.state.dashboard
    return shared


async def run_of(request: Request, run: str) -> RunView:
    """The run that a URL names. Raises UnknownRunError, which the application turns into a page."""
    return await dashboard(request).watcher.view(run)


def visitor(request: Request) -> Visitor:
    """The sender of the request, and whether the sender may change something."""
    sender: Visitor = request.scope[VISITOR]
    return sender


def form_of(request: Request) -> dict[str, str]:
    """The fields of a POST. If several fields have the same name, the first one counts."""
    fields: dict[str, str] = request.scope[FORM]
    return fields


def chart_json(chart: Chart) -> Response:
    """The numbers of a chart, in the form for charts.js."""
    return Response(as_json(chart.told).encode("utf-8", "replace"), media_type="application/json")


def is_part(request: Request) -> bool:
    """Whether htmx requests a part of the page."""
    return request.headers.get("hx-request") == "true"


def page(
    request: Request,
    template: str,
    *,
    news: list[str] | None = None,
    status: int = 200,
    **data: Any,
) -> HTMLResponse:
    """The page `templates/TEMPLATE`. `news`: the keys of the runs whose changes the page waits for.
    After a change, the browser requests every element with `data-live` again (`hx-get`,
    `hx-trigger="news"`)."""
    theme = request.cookies.get(THEME, "")
    live_url = f"/live?{urlencode([('run', key) for key in news])}" if news else ""
    watcher = dashboard(request).watcher
    text = render(
        template,
        theme=theme if theme in THEMES else "",
        news=live_url,
        visitor=visitor(request),
        versions={key: watcher.version(key) for key in news or ()},
        **data,
    )
    return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


def part(template: str, **data: Any) -> HTMLResponse:
    """A part of a page, for htmx."""
    text = render(template, **data).encode("utf-8", "replace")
    # The part has the URL of the whole page, so a browser must not cache it as that page.
    return HTMLResponse(text, headers={"cache-control": "no-store", "vary": "HX-Request"})
