"""The application: its pages, its static files, and its answers to errors.

To add a page: a module with a `router`, its template in `pages/templates`, a line in ROUTERS, and a
line in `observability/pages/navigation.py` if it belongs to a run.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import agentevo
from agentevo.errors import AgentEvoError
from agentevo.observability.pages import assets
from agentevo.runs.folder.sources import Sources
from agentevo_ui import (
    attempt_page,
    attempts_page,
    compare_page,
    control_page,
    data_page,
    evaluation_page,
    live,
    metrics_page,
    pipeline_page,
    processes_page,
    results_page,
    run_page,
    runs_page,
    try_page,
)
from agentevo_ui.access import VISITOR, Access, AccessGuard
from agentevo_ui.confirmations import Confirmations
from agentevo_ui.context import Dashboard, NotFoundError, page
from agentevo_ui.index.indexer import Indexes
from agentevo_ui.players import Players
from agentevo_ui.run_watcher import UnknownRunError, Watcher
from agentevo_ui.shared_answers import SharedAnswers
from agentevo_ui.stores import Stores
from agentevo_ui.work import Works

ROUTERS: tuple[APIRouter, ...] = (
    runs_page.router,
    compare_page.router,
    run_page.router,
    metrics_page.router,
    live.router,
    attempts_page.router,
    attempt_page.router,
    control_page.router,
    evaluation_page.router,
    data_page.router,
    processes_page.router,
    results_page.router,
    pipeline_page.router,
    try_page.router,
)
CACHE_FOREVER = "private, max-age=31536000, immutable"


def make_app(sources: Sources, access: Access) -> tuple[AccessGuard, Dashboard]:
    """The application behind its guard, and the resources to close at the end. Call it on the
    application's event loop."""
    app = FastAPI(
        title="AgentEvo dashboard", version=agentevo.__version__, docs_url=None, redoc_url=None
    )
    stores = Stores(sources)
    watcher = Watcher(sources, stores)
    works = Works(stores)
    shared = Dashboard(sources, watcher, stores, Indexes(), works, Players(), Confirmations())
    app.state.dashboard = shared
    for router in ROUTERS:
        app.include_router(router)

    app.get("/static/{digest}/{name:path}", include_in_schema=False)(_static)
    app.exception_handler(UnknownRunError)(_unknown_run)
    app.exception_handler(NotFoundError)(_not_found)
    app.exception_handler(AgentEvoError)(_refuse)
    app.exception_handler(TimeoutError)(_late)
    app.exception_handler(RequestValidationError)(_wrong_words)
    app.exception_handler(HTTPException)(_http)
    app.exception_handler(Exception)(_broken)

    return AccessGuard(SharedAnswers(app, watcher, VISITOR), access), shared


async def _static(digest: str, name: str) -> Response:
    if name not in assets.names() or digest != assets.digest(name):
        raise HTTPException(404)
    return Response(
        assets.contents(name),
        media_type=assets.kind(name),
        headers={"cache-control": CACHE_FOREVER},
    )


def _problem(request: Request, status: int, heading: str, text: str) -> Response:
    return page(request, "problem.html", status=status, heading=heading, text=text)


async def _unknown_run(request: Request, error: Exception) -> Response:
    shown = request.app.state.dashboard.sources.shown
    text = f"There is no run {error} in {shown}. It may have been moved or deleted."
    return _problem(request, 404, "No such run", text)


async def _not_found(request: Request, error: Exception) -> Response:
    return _problem(request, 404, "Not found", str(error))


async def _refuse(request: Request, error: Exception) -> Response:
    return _problem(request, 503, "This can't be shown", str(error))


async def _late(request: Request, error: Exception) -> Response:
    text = "The disk or the database took too long. Load the page again."
    return _problem(request, 503, "This takes too long", text)


async def _wrong_words(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(
        f"{problem['loc'][-1]}: {problem['msg']}"
        for problem in error.errors()[:5]
        if problem.get("loc")
    )
    return _problem(request, 422, "This address is not valid", wrong)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        heading = "Not answered"
        text = "This address does not accept this method."
    else:
        heading = "Not found"
        text = "There is no such page."

    answer = _problem(request, error.status_code, heading, text)
    answer.headers.update(error.headers or {})
    return answer


async def _broken(request: Request, error: Exception) -> Response:
    # the guard, to which Starlette passes the exception on, reports it
    text = "This page failed. The terminal of `agentevo ui` shows the reason."
    return _problem(request, 500, "Something is wrong here", text)
