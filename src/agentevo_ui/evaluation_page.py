"""Held-out results of a run: `/runs/{run}/evaluation`, next to those of other runs (`with`), and
the changes between two steps (`from`, `to`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from agentevo.errors import AgentEvoError
from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.observability.pages.embedded_json import for_json
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui import held_out
from agentevo_ui.attempts_page import ready_index
from agentevo_ui.context import NotFoundError, dashboard, run_of
from agentevo_ui.held_out import Account, HeldOut, StepComparison
from agentevo_ui.index.reader import IndexReader, IndexUnavailableError
from agentevo_ui.run_page import run_page
from agentevo_ui.run_watcher import UnknownRunError
from agentevo_ui.runs_page import newest_evaluation

router = APIRouter()

MAX_COMPARED = 8
MAX_OFFERED = 60
GREEDY = "greedy"


class EvaluationResult(NamedTuple):
    """A row of the table of results."""

    name: str
    key: str
    step: int | None
    account: Account


class EvaluationAttempts(NamedTuple):
    """The content of the page, after the index exists."""

    decodings: dict[str, int]
    decoding: str
    agents: dict[str, int]
    agent: str
    steps: list[int]
    first: int | None
    last: int | None
    rows: list[EvaluationResult]
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
    compared: tuple[str, ...]

    def query(self, **changed: Any) -> str:
        """The query of an address with some changes."""
        values = {
            "decoding": self.decoding,
            "agent": self.agent,
            "from": self.first,
            "to": self.last,
            "with": list(self.compared),
        } | changed
        return urlencode({k: v for k, v in values.items() if v not in ("", None, [])}, doseq=True)


@router.get("/runs/{run}/evaluation", response_class=HTMLResponse)
async def evaluation(
    request: Request,
    run: str,
    decoding: str = "",
    agent: str = "",
    first: int | None = Query(default=None, alias="from"),
    last: int | None = Query(default=None, alias="to"),
    compared: list[str] = Query(default=[], alias="with"),  # noqa: B008 (FastAPI's way to say it)
) -> HTMLResponse:
    """The results, as a page."""
    view = await run_of(request, run)
    selection = EvaluationQuery(
        decoding, agent, first, last, tuple(dict.fromkeys(compared))[:MAX_COMPARED]
    )
    attempts, missing, (state, trouble) = await _find(request, view, selection)
    players = newest_evaluation(view) if not view.summary else (view.summary.get("eval") or {})
    base = run_url(view.key, "evaluation")

    return run_page(
        request,
        "evaluation.html",
        view,
        "evaluation",
        found=attempts,
        missing=missing,
        index=state,
        trouble=trouble,
        asked=selection,
        base=base,
        here=f"{base}?{selection.query()}",
        random=_number(players.get("random")),
        optimal=_number(players.get("optimal")),
        offered=await _offer_runs(request, view, selection),
    )


@router.get("/runs/{run}/evaluation/series")
async def series(
    request: Request,
    run: str,
    decoding: str = "",
    agent: str = "",
    compared: list[str] = Query(default=[], alias="with"),  # noqa: B008 (FastAPI's way to say it)
) -> Response:
    """The numbers of the page's chart, in the form for charts.js."""
    view = await run_of(request, run)
    selection = EvaluationQuery(
        decoding, agent, None, None, tuple(dict.fromkeys(compared))[:MAX_COMPARED]
    )
    attempts, _, _ = await _find(request, view, selection)
    if attempts is None or attempts.chart is None:
        raise NotFoundError("This run was not evaluated, or its index is not there yet.")
    text = json.dumps(for_json(attempts.chart.told), separators=(",", ":"), allow_nan=False)
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


async def _find(
    request: Request, view: RunView, selection: EvaluationQuery
) -> tuple[EvaluationAttempts | None, list[str], tuple[Any, str]]:
    """The content of the page, the reasons why some of the compared runs are missing, and the
    progress of the index."""
    reader, state = await ready_index(request, view)
    compared_runs: list[tuple[RunView, IndexReader]] = []
    missing = []
    for key in selection.compared:
        try:
            other_view = await run_of(request, key)
            its, (its_state, its_trouble) = await ready_index(request, other_view)
        except (UnknownRunError, AgentEvoError) as error:
            missing.append(f"{key}: {error if isinstance(error, AgentEvoError) else 'no such run'}")
            continue

        if not its_state.at:
            why = its_trouble or "its attempts are being listed, load the page again"
            missing.append(f"{key}: {why}")
            continue

        compared_runs.append((other_view, its))

    attempts = None
    with suppress(IndexUnavailableError):
        if state[0].at:
            attempts = await in_thread(_read, view, reader, selection, compared_runs)

    return attempts, missing, state


def _read(
    view: RunView,
    reader: IndexReader,
    selection: EvaluationQuery,
    compared_runs: Sequence[tuple[RunView, IndexReader]],
) -> EvaluationAttempts:
    with reader.steady():
        everything = held_out.held_out(reader)
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
            EvaluationResult(view.title, view.key, step, held_out.account_at(attempts, step))
            for step in dict.fromkeys((first, last))
            if step is not None
        ]
        curves = [(view.title, held_out.curve(attempts))]
        for other_view, its in compared_runs:
            row, line = _compared_result(other_view, its, decoding)
            rows += row
            curves.append((other_view.title, line))

        changed = None
        if first is not None and last is not None and first != last:
            changed = held_out.changes(reader, attempts, first, last)

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
            _chart(curves),
        )


def _compared_result(
    view: RunView, reader: IndexReader, decoding: str
) -> tuple[list[EvaluationResult], list[tuple[int, Any]]]:
    """The newest results of another run, and its curve."""
    try:
        with reader.steady():
            attempts = held_out.held_out(reader).of_word("decoding", decoding)
            steps = attempts.steps
            if not steps:
                return [], []
            account = held_out.account_at(attempts, steps[-1])
            return [EvaluationResult(view.title, view.key, steps[-1], account)], held_out.curve(
                attempts
            )
    except IndexUnavailableError:
        return [], []


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


def _chart(curves: Sequence[tuple[str, list[tuple[int, Any]]]]) -> Chart | None:
    where = sorted({step for _, line in curves for step, _ in line})
    if len(where) < 2:
        return None

    lines = []
    for color, (name, line) in enumerate(curves):
        at = dict(line)
        ends = [
            [getattr(at[step], end) if step in at else math.nan for step in where]
            for end in ("value", "low", "high")
        ]
        lines.append(ChartLine(name, ends[0], low=ends[1], high=ends[2], color=color))

    return Chart("Success on held-out tasks", where, lines, share=True)


async def _offer_runs(
    request: Request, view: RunView, selection: EvaluationQuery
) -> list[tuple[str, str, str, bool]]:
    """(name, key, address with or without it, whether it is chosen) of other runs."""
    offers = []
    for other_view in await dashboard(request).watcher.views():
        if other_view.key == view.key or not (
            other_view.config or other_view.key in selection.compared
        ):
            continue
        chosen = other_view.key in selection.compared
        keys = [key for key in selection.compared if key != other_view.key] + [other_view.key] * (
            not chosen
        )
        offers.append((other_view.title, other_view.key, selection.query(**{"with": keys}), chosen))

    return sorted(offers, key=lambda offer: (not offer[3], offer[0]))[:MAX_OFFERED]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
