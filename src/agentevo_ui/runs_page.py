"""The list of all runs: `GET /`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.observability.collapse import SCORE
from agentevo.observability.metrics import read_evaluations
from agentevo.observability.pages.text import without_folders
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.context import dashboard, is_part, page, part
from agentevo_ui.run_watcher import LIST

router = APIRouter()

SORTS = {
    "newest": ("Newest", lambda row: -(row.view.changed_at or 0)),
    "name": ("Name", lambda row: row.view.title.lower()),
    "result": ("Result", lambda row: -(row.after if row.after is not None else -math.inf)),
    "progress": ("Progress", lambda row: -row.share),
}
STATES = ("running", "finished", "interrupted", "failed", "damaged")
MAX_LIVE = 500
MAX_SWEEPS = 200
"""The maximum number of sweeps and evaluations in the list."""


@dataclass(frozen=True)
class RunRow:
    """A run as the list shows it."""

    view: RunView
    before: float | None
    after: float | None
    random: float | None
    optimal: float | None
    rewards: list[float]
    about: str

    @property
    def share(self) -> float:
        return self.view.step / self.view.planned if self.view.planned else 0.0


@router.get("/", response_class=HTMLResponse)
async def runs(
    request: Request, q: str = "", state: str = "", sort: str = "newest"
) -> HTMLResponse:
    """All runs, searched by name, environment, model and state, and sorted."""
    shared = dashboard(request)
    rows = [row_of(view) for view in await shared.watcher.views()]
    words = q.lower().split()
    chosen = [
        row
        for row in rows
        if (not state or row.view.state == state)
        and all(word in f"{row.view.key} {row.view.name} {row.about}".lower() for word in words)
    ]
    chosen.sort(key=SORTS.get(sort, SORTS["newest"])[1])
    counts = {name: sum(row.view.state == name for row in rows) for name in STATES}
    data: dict[str, Any] = {
        "rows": chosen,
        "total": len(rows),
        "q": q,
        "state": state,
        "sort": sort if sort in SORTS else "newest",
        "sorts": {name: title for name, (title, _) in SORTS.items()},
        "counts": {name: number for name, number in counts.items() if number},
        "shown": shared.sources.shown,
        "is_cut": shared.sources.is_cut,
        "sweeps": sweeps_of([row.view for row in rows])[:MAX_SWEEPS],
        "pipelines": sorted(await in_thread(shared.sources.pipelines))[:MAX_SWEEPS],
        "evaluations": sorted(await in_thread(shared.sources.own_results))[:MAX_SWEEPS],
    }
    if is_part(request):
        return part("runs_table.html", **data)

    news = [row.view.key for row in chosen if row.view.state == "running"] or [
        row.view.key for row in chosen
    ]
    return page(request, "runs.html", news=[LIST, *news[:MAX_LIVE]], **data)


def sweeps_of(views: Sequence[RunView]) -> list[tuple[str, str, int]]:
    """(key, name, number of runs) of the sweeps that contain some of these runs."""
    sweeps: dict[str, tuple[str, int]] = {}
    for view in views:
        key = view.source.sweep
        folder = view.source.folder
        if key is not None and folder is not None:
            sweeps[key] = (folder.parent.name, sweeps.get(key, ("", 0))[1] + 1)
    return sorted((key, name, many) for key, (name, many) in sweeps.items())


def row_of(view: RunView) -> RunRow:
    """The row of a run in the list, from its summary, else from its newest numbers."""
    scores = view.summary.get("eval") or {}
    figures = {name: scores.get(name) for name in ("before", "after", "random", "optimal")}
    if not view.summary:
        figures |= newest_evaluation(view)

    _, rewards = view.table.series(SCORE)
    environment = view.summary.get("environment") or view.setting("environment", "type")
    model = view.summary.get("model") or view.setting("model", "name")
    how = view.command if view.command in ("sft", "rm") else view.setting("algorithm", "name")
    about = [environment, model, how]

    return RunRow(
        view=view,
        rewards=list(rewards),
        about=" · ".join(without_folders(fact)[:60] for fact in about if fact),
        **{
            name: value if isinstance(value, (int, float)) else None
            for name, value in figures.items()
        },
    )


def newest_evaluation(view: RunView) -> dict[str, float | None]:
    """Success before and now, and the success of the two reference players, for a running run."""
    first: dict[str, float | None] = {}
    last: dict[str, float | None] = {}
    for name in list(view.table.columns):
        if name.startswith(("val-core/", "val-aux/")):
            _, values = view.table.series(name)
            if values:
                first[name] = values[0]
                last[name] = values[-1]

    opening = read_evaluations(first)
    newest = read_evaluations(last)
    if not newest:
        return {}

    return {
        "before": opening[0].success,
        "after": newest[0].success,
        "random": newest[0].random,
        "optimal": newest[0].optimal,
    }
