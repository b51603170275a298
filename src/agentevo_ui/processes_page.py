"""The processes of a run: `/runs/{run}/processes`, and the end of a log below it."""

from __future__ import annotations

from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui import process_files
from agentevo_ui.context import NotFoundError, dashboard, run_of
from agentevo_ui.process_files import ListedEngine, Log, Weights, log_text
from agentevo_ui.run_page import run_page

router = APIRouter()

STALENESS = "staleness/age_"


class KeptProcesses(NamedTuple):
    """The processes' files in the run's folder."""

    engines: list[ListedEngine]
    logs: list[Log]
    weights: Weights | None
    has_gateway: bool


@router.get("/runs/{run}/processes", response_class=HTMLResponse)
async def processes(request: Request, run: str) -> HTMLResponse:
    """Trainer, engines, samplers, gateways, and their logs."""
    view = await run_of(request, run)
    stored = await in_thread(_read_files, view)
    return run_page(
        request,
        "processes.html",
        view,
        "processes",
        kept=stored,
        work=await dashboard(request).works.of(view),
        ages=ages_of(view),
        staleness=[view.table.latest(f"staleness/{name}") for name in ("mean", "max")],
        is_apart=_is_apart(view, stored),
    )


@router.get("/runs/{run}/processes/log", response_class=HTMLResponse)
async def log(request: Request, run: str, name: str) -> HTMLResponse:
    """The end of a log."""
    view = await run_of(request, run)
    try:
        log_end = await in_thread(process_files.log_end, view.source, name)
    except OSError as error:
        raise NotFoundError(f"This log can't be read: {error.strerror or error}.") from error

    if log_end is None:
        raise NotFoundError(f"This run has no log {name[:200]}.")

    text = await in_thread(lambda: log_text(log_end.data, is_cut=log_end.is_cut))
    address = f"{run_url(view.key, 'processes', 'log')}"
    return run_page(
        request,
        "process_log.html",
        view,
        "processes",
        log=log_end.log,
        found=log_end,
        text=text,
        here=address,
    )


def _read_files(view: RunView) -> KeptProcesses:
    gateway = view.source.file("gateway")
    return KeptProcesses(
        process_files.engines(view.source),
        process_files.logs(view.source),
        process_files.weights(view.source),
        gateway is not None and gateway.is_dir(),
    )


def _is_apart(view: RunView, stored: KeptProcesses) -> bool:
    """Whether the run has other processes than its trainer."""
    samplers = view.setting("rollout", "samplers")
    return bool(stored.engines or stored.weights) or (isinstance(samplers, int) and samplers > 0)


def ages_of(view: RunView) -> list[tuple[int, float]]:
    """(age in versions, share of the tokens) of the newest step that has logged them."""
    ages = []
    for name in list(view.table.columns):
        age = name.removeprefix(STALENESS)
        value = view.table.latest(name) if name.startswith(STALENESS) else None
        if value and age.isdecimal():
            ages.append((int(age), value))
    return sorted(ages)
