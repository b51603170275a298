"""A run's tasks and their states in the ledger: `/runs/{run}/data`. The page reads the index, and
only the failed and poison tasks from the store."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from agentevo.errors import AgentEvoError
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.credentials import without_password
from agentevo.store.records import Split, StoredTask
from agentevo_ui import task_tallies
from agentevo_ui.attempts_page import read_index, ready_index
from agentevo_ui.context import dashboard, run_of
from agentevo_ui.index.derived import task_words
from agentevo_ui.index.reader import OpenIndex
from agentevo_ui.index.selection import Selection
from agentevo_ui.run_page import run_page
from agentevo_ui.task_facts import TaskFacts, read_task_facts, task_facts
from agentevo_ui.task_tallies import ORDERS, PAGE, TalliedTasks

router = APIRouter()

MAX_SET_ASIDE = 100
"""The number of tasks on a page of the list of failed and poison tasks."""
MAX_EVENTS = 5
STORE_TIMEOUT_S = 10.0
MAX_TEXT = 200
AsideState = Literal["poison", "failed"]
Order = Literal["played", "hardest", "easiest", "worst", "failing"]


class TaskSearch(NamedTuple):
    """A run's tasks in the index."""

    ledger: list[tuple[str, list[tuple[str, int]]]]
    reasons: list[tuple[str, int]]
    """(reason, number) pairs of dropped attempts."""
    errors: list[tuple[str, int]]
    """(kind of error, number) pairs of failed attempts."""
    tasks: TalliedTasks
    task_states: dict[str, int]
    """Maps a state of the ledger to the number of tasks in that state at `counted_at`."""
    counted_at: float


class SetAsideTask(NamedTuple):
    """A failed or poison task of the ledger."""

    state: str
    id: str
    kind: str
    facts: TaskFacts
    error: str
    num_leases: int
    num_failures: int
    num_expiries: int
    events: Sequence[tuple[str, float, str, str]]
    """(kind, time, worker, error), the newest first."""


@router.get("/runs/{run}/data", response_class=HTMLResponse)
async def data(
    request: Request,
    run: str,
    split: Split = "train",
    q: str = "",
    order: Order = "played",
    page: int = Query(default=0, ge=0, le=1_000_000),
    aside_state: AsideState = "poison",
    aside_after: str = Query(default="", max_length=1000),
) -> HTMLResponse:
    """Tasks, the ledger's states, and the reasons why attempts were not trained on."""
    view = await run_of(request, run)
    reader, (state, trouble) = await ready_index(request, view)
    text = q[:MAX_TEXT].strip()
    contents = None
    if state.at:
        contents = await read_index(
            reader, lambda index: _search_index(index, split, text, order, page)
        )

    rows = [] if contents is None else contents.tasks.rows
    facts = await read_task_facts(request, view, [row.id for row in rows])
    aside, has_more, no_aside = await _read_set_aside(request, view, aside_state, aside_after)
    base = run_url(view.key, "data")
    keys = {"split": split, "q": text, "order": order}
    query_keys = {name: value for name, value in keys.items() if value}
    aside_query = {"aside_state": aside_state, "aside_after": aside_after} if aside_after else {}

    return run_page(
        request,
        "data.html",
        view,
        "data",
        found=contents,
        task_facts=facts,
        index=state,
        trouble=trouble,
        aside=aside,
        aside_first=f"{base}?{urlencode(query_keys)}" if aside_after else "",
        aside_next=f"{base}?{urlencode(query_keys | _next_query(aside[-1]))}" if has_more else "",
        no_aside=no_aside,
        command=_retry_command(view),
        split=split,
        text=text,
        order=order,
        orders=ORDERS,
        base=base,
        here=f"{base}?{urlencode(query_keys | {'page': page} | aside_query)}",
        before=f"{base}?{urlencode(query_keys | {'page': page - 1})}" if page else "",
        after=f"{base}?{urlencode(query_keys | {'page': page + 1})}"
        if contents is not None and contents.tasks.total > (page + 1) * PAGE
        else "",
    )


def _search_index(index: OpenIndex, split: str, text: str, order: str, page: int) -> TaskSearch:
    states, counted_at = index.task_states()
    return TaskSearch(
        task_tallies.ledger(index),
        index.count_words(Selection(), "reason"),
        index.count_words(Selection(), "error"),
        task_tallies.tasks(index, split=split, text=text, order=order, page=page),
        states,
        counted_at,
    )


async def _read_set_aside(
    request: Request, view: RunView, state: AsideState, after: str
) -> tuple[list[SetAsideTask], bool, str]:
    """A page of the poison tasks and then the failed tasks that follow the task `after`, whether
    there are more, and the reason why they can't be read (empty if they can)."""
    tasks_aside: list[SetAsideTask] = []
    last_id: str | None = after or None
    try:
        async with (
            asyncio.timeout(STORE_TIMEOUT_S),
            dashboard(request).stores.reading(view.source) as store,
        ):
            for state_name in get_args(AsideState)[get_args(AsideState).index(state) :]:
                listed: Any = store.tasks(state=state_name, after=last_id)
                last_id = None
                async with aclosing(listed):
                    async for stored in listed:
                        if len(tasks_aside) == MAX_SET_ASIDE:
                            return tasks_aside, True, ""
                        tasks_aside.append(_set_aside_task(stored))
    except (AgentEvoError, TimeoutError) as error:
        return (
            tasks_aside,
            False,
            str(error) or f"the store did not answer within {STORE_TIMEOUT_S:.0f} s",
        )

    return tasks_aside, False, ""


def _next_query(last_task: SetAsideTask) -> dict[str, str]:
    return {"aside_state": last_task.state, "aside_after": last_task.id}


def _set_aside_task(stored: StoredTask) -> SetAsideTask:
    events = [(event.kind, event.at, event.worker, event.error) for event in stored.history]
    return SetAsideTask(
        stored.state,
        stored.task.id,
        task_words(stored.task).kind,
        task_facts(stored.task),
        stored.error or "",
        stored.num_leases,
        stored.num_failures,
        stored.num_expiries,
        events[::-1][:MAX_EVENTS],
    )


def _retry_command(view: RunView) -> str:
    return f"agentevo store {shlex.quote(_store_argument(view))} retry"


def _store_argument(view: RunView) -> str:
    """The argument of `agentevo store` for this run's store."""
    if view.source.folder is not None:
        return str(view.source.folder)
    return without_password(view.source.url or "")
