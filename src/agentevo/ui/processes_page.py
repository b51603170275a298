"""The processes of a run: `/runs/{run}/processes`, and the end of a log below it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.errors import AgentEvoError
from agentevo.event_loop import in_thread
from agentevo.pages.navigation import run_url
from agentevo.ui import process_files
from agentevo.ui.context import NotFoundError, dashboard, run_of
from agentevo.ui.process_files import ListedEngine, Log, Weights, log_text
from agentevo.ui.run_page import run_page
from agentevo.ui.run_state import RunView

router = APIRouter()

MOST_CALLS = 2_000
MOST_LEASED = 200
WITHIN_S = 10.0
STALENESS = "staleness/age_"


class PlayerRow(NamedTuple):
    """A process that plays attempts at this moment."""

    recorder: str
    num_attempts: int
    oldest_at: float


class HeldProcess(NamedTuple):
    """What the store says."""

    players: list[PlayerRow]
    is_cut: bool
    leased: list[tuple[str, int, int]]
    """(task, how often it was leased, how often its worker was lost)."""
    problem: str = ""


class KeptProcesses(NamedTuple):
    """What lies in the run's folder."""

    engines: list[ListedEngine]
    logs: list[Log]
    weights: Weights | None
    has_gateway: bool


@router.get("/runs/{run}/processes", response_class=HTMLResponse)
async def processes(request: Request, run: str) -> HTMLResponse:
    """Trainer, engines, samplers, gateways, and their logs."""
    view = await run_of(request, run)
    kept = await in_thread(_kept, view)
    return run_page(
        request,
        "processes.html",
        view,
        "processes",
        kept=kept,
        held=await _held(request, view),
        ages=ages_of(view),
        staleness=[view.table.latest(f"staleness/{name}") for name in ("mean", "max")],
        is_apart=_is_apart(view, kept),
    )


@router.get("/runs/{run}/processes/log", response_class=HTMLResponse)
async def log(request: Request, run: str, name: str) -> HTMLResponse:
    """The end of one log."""
    view = await run_of(request, run)
    try:
        found = await in_thread(process_files.log_end, view.source, name)
    except OSError as error:
        raise NotFoundError(f"This log can't be read: {error.strerror or error}.") from error

    if found is None:
        raise NotFoundError(f"This run has no log {name[:200]}.")

    text = await in_thread(lambda: log_text(found.data, is_cut=found.is_cut))
    here = f"{run_url(view.key, 'processes', 'log')}"
    return run_page(
        request,
        "process_log.html",
        view,
        "processes",
        log=found.log,
        found=found,
        text=text,
        here=here,
    )


def _kept(view: RunView) -> KeptProcesses:
    gateway = view.source.file("gateway")
    return KeptProcesses(
        process_files.engines(view.source),
        process_files.logs(view.source),
        process_files.weights(view.source),
        gateway is not None and gateway.is_dir(),
    )


def _is_apart(view: RunView, kept: KeptProcesses) -> bool:
    """Whether the run has other processes than its trainer."""
    samplers = view.setting("rollout", "samplers")
    return bool(kept.engines or kept.weights) or (isinstance(samplers, int) and samplers > 0)


def ages_of(view: RunView) -> list[tuple[int, float]]:
    """(age in versions, share of the tokens) of the newest step that has said it."""
    found = []
    for name in list(view.table.columns):
        age = name.removeprefix(STALENESS)
        value = view.table.latest(name) if name.startswith(STALENESS) else None
        if value and age.isdecimal():
            found.append((int(age), value))
    return sorted(found)


async def _held(request: Request, view: RunView) -> HeldProcess:
    try:
        async with (
            asyncio.timeout(WITHIN_S),
            dashboard(request).stores.reading(view.source) as store,
        ):
            running = [
                one.call
                async for one in store.calls(state="running", limit=MOST_CALLS, newest_first=True)
            ]
            leased = []
            async with aclosing(store.tasks(state="leased")) as listed:  # type: ignore[type-var]
                async for one in listed:
                    leased.append((one.task.id, one.num_leases, one.num_expiries))
                    if len(leased) >= MOST_LEASED:
                        break
    except (AgentEvoError, TimeoutError) as error:
        why = str(error) or f"the store did not answer within {WITHIN_S:.0f} s"
        return HeldProcess([], False, [], why)

    attempts = [call for call in running if call.parent is None]
    counts = Counter(call.id.rpartition("-")[0] for call in attempts)

    oldest: dict[str, float] = {}
    for call in attempts:
        name = call.id.rpartition("-")[0]
        oldest[name] = min(oldest.get(name, call.started_at), call.started_at)

    players = [PlayerRow(name, many, oldest[name]) for name, many in counts.most_common()]
    return HeldProcess(players, len(running) == MOST_CALLS, leased)
