"""Held-out results of a run: `/runs/{run}/evaluation`, and the changes between two steps (`from`,
`to`)."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.evaluation.estimates import Estimate
from agentevo.runs.folder.run_state import RunView
from agentevo_ui import held_out
from agentevo_ui.attempts_page import read_index, ready_index
from agentevo_ui.context import NotFoundError, chart_json, run_of
from agentevo_ui.held_out import Account, HeldOut, StepComparison
from agentevo_ui.index.reader import IndexState, OpenIndex
from agentevo_ui.run_page import run_page
from agentevo_ui.runs_page import newest_evaluation

router = APIRouter()

GREEDY = "greedy"


class EvaluationAttempts(NamedTuple):
    """The content of the page, after the index exists."""

    decodings: dict[str, int]
    decoding: str
    agents: dict[str, int]
    agent: str
    steps: list[int]
    first: int | None
    last: int | None
    rows: list[tuple[int, Account]]
    """(step, results) of the two steps."""
    parts: list[tuple[str, str, Account | None, Account]]
    """(kind, difficulty, account at the first step, account at the last step)."""
    changes: StepComparison | None
    chart: Chart | None


class EvaluationQuery(NamedTuple):
    """The selection in the address."""

    decoding: str
    agent: str
    first: int | None
    last: int | None

    def query(self, **changed: Any) -> str:
        """The query of an address with some changes."""
        values = {
            "decoding": self.decoding,
            "agent": self.agent,
            "from": self.first,
            "to": self.last,
        } | changed
        return urlencode({k: v for k, v in values.items() if v not in ("", None)})


@router.get("/runs/{run}/evaluation", response_class=HTMLResponse)
async def evaluation(
    request: Request,
    run: str,
    decoding: str = "",
    agent: str = "",
    first: int | None = Query(default=None, alias="from"),
    last: int | None = Query(default=None, alias="to"),
) -> HTMLResponse:
    """The results, as a page."""
    view = await run_of(request, run)
    selection = EvaluationQuery(decoding, agent, first, last)
    attempts, (state, trouble) = await _find(request, view, selection)
    players = newest_evaluation(view) if not view.summary else (view.summary.get("eval") or {})
    base = run_url(view.key, "evaluation")

    return run_page(
        request,
        "evaluation.html",
        view,
        "evaluation",
        found=attempts,
        index=state,
        trouble=trouble,
        asked=selection,
        base=base,
        here=f"{base}?{selection.query()}",
        random=_number(players.get("random")),
        optimal=_number(players.get("optimal")),
    )


@router.get("/runs/{run}/evaluation/series")
async def series(
    request: Request,
    run: str,
    decoding: str = "",
    agent: str = "",
) -> Response:
    """The numbers of the page's chart, in the form for charts.js."""
    view = await run_of(request, run)
    attempts, _ = await _find(request, view, EvaluationQuery(decoding, agent, None, None))
    if attempts is None or attempts.chart is None:
        raise NotFoundError("This run was not evaluated, or its index is not there yet.")
    return chart_json(attempts.chart)


async def _find(
    request: Request, view: RunView, selection: EvaluationQuery
) -> tuple[EvaluationAttempts | None, tuple[IndexState, str]]:
    """The content of the page, and the progress of the index."""
    reader, state = await ready_index(request, view)
    attempts = None
    if state[0].at:
        attempts = await read_index(reader, lambda index: _read(view, index, selection))

    return attempts, state


def _read(view: RunView, index: OpenIndex, selection: EvaluationQuery) -> EvaluationAttempts:
    everything = held_out.held_out(index)
    decodings = everything.count_words("decoding")
    decoding = held_out.first_of(decodings, selection.decoding, preferred=GREEDY)
    attempts = everything.of_word("decoding", decoding)
    agents = attempts.count_words("agent")
    named = view.config.get("agents")
    trained = next(iter(named), "") if isinstance(named, dict) else ""
    agent = held_out.first_of(agents, selection.agent, preferred=str(trained))
    attempts = attempts.of_word("agent", agent)
    steps = attempts.steps
    first = selection.first if selection.first in steps else (steps[0] if steps else None)
    last = selection.last if selection.last in steps else (steps[-1] if steps else None)
    rows = [
        (step, held_out.account_at(attempts, step))
        for step in dict.fromkeys((first, last))
        if step is not None
    ]
    changed = None
    if first is not None and last is not None and first != last:
        changed = held_out.changes(index, attempts, first, last)

    return EvaluationAttempts(
        decodings,
        decoding,
        agents,
        agent,
        steps,
        first,
        last,
        rows,
        _parts(attempts, first, last),
        changed,
        _chart(view.title, held_out.curve(attempts)),
    )


def _parts(
    attempts: HeldOut, first: int | None, last: int | None
) -> list[tuple[str, str, Account | None, Account]]:
    """Results by kind and difficulty. Empty unless the tasks have several."""
    if last is None:
        return []

    now = held_out.by_part(attempts.part(attempts.step == last))
    if len(now) < 2:
        return []

    before = {part[:2]: part[2] for part in held_out.by_part(attempts.part(attempts.step == first))}
    return [
        (kind, difficulty, before.get((kind, difficulty)) if first != last else None, account)
        for kind, difficulty, account in now
    ]


def _chart(name: str, curve: list[tuple[int, Estimate]]) -> Chart | None:
    if len(curve) < 2:
        return None

    steps, estimates = zip(*curve, strict=True)
    line = ChartLine(
        name,
        [estimate.value for estimate in estimates],
        low=[estimate.low for estimate in estimates],
        high=[estimate.high for estimate in estimates],
    )
    return Chart("Success on held-out tasks", list(steps), [line], share=True)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
