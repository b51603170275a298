"""Lists of attempts: `/runs/{run}/attempts` (all of them), and `/runs/{run}/steps/{step}` (a step's
groups). Both read the index, and a step's page reads its record from the store."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.pages.histograms import HistogramBar, histogram
from agentevo.observability.pages.navigation import run_url
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.context import NotFoundError, dashboard, is_part, part, run_of
from agentevo_ui.index.reader import (
    IndexReader,
    IndexRow,
    IndexState,
    IndexUnavailableError,
    Listing,
    OpenIndex,
)
from agentevo_ui.index.selection import ORDERS, Selection, exact
from agentevo_ui.run_page import run_page
from agentevo_ui.task_facts import read_task_facts

router = APIRouter()
T = TypeVar("T")

HISTOGRAMS = (("reward", "Reward"), ("tokens", "Sampled tokens"), ("age", "Age in versions"))
TITLES = {
    "split": "Split",
    "state": "Ledger",
    "status": "Status",
    "outcome": "Outcome",
    "kind": "Kind of task",
    "difficulty": "Difficulty",
    "decoding": "Decoding",
    "agent": "Agent",
    "error": "Error",
    "reason": "Dropped for",
}
PARTIAL_FILTERS = ("error", "reason")
"""Filters that most attempts have no word for, so even a single word is a choice."""
WHY_NOT = {
    "advantage": "no attempt here was trained on, or its advantages can't be recomputed",
    "moved": "no attempt here was trained on, or its run stored none (tracking.token_numbers)",
    "unlikely": "no sampled token here, or the log-probs are not read yet",
    "judge": "the recipe does not have both a judge and a rule, or neither scored an attempt here",
    "oldest-tokens": "no attempt here was trained on, or the versions are not read yet",
}

FIRST_S = 1.5
"""The time in seconds that a page waits for the first version of an index."""


class AttemptChoice(NamedTuple):
    """A filter by a word: its values with their links."""

    title: str
    name: str
    chosen: str
    words: list[tuple[str, int, str]]
    """(word, count, link). The link of the chosen word removes the filter."""


class View(NamedTuple):
    """The content of both pages for a selection."""

    selection: Selection
    choices: list[AttemptChoice]
    orders: list[tuple[str, str, str]]
    """(title, link, why it can't be chosen)."""
    pictures: list[tuple[str, Any, str]]
    """(title, histogram, link that removes its range, or empty)."""
    size: int
    successes: int
    mean: float | None
    spread: float | None


async def reader_of(request: Request, view: RunView) -> tuple[IndexReader, str]:
    """The index of a run, and the URL of its store. Raises ConfigError."""
    shared = dashboard(request)
    url = await in_thread(shared.sources.store_url, view.source)
    return shared.indexes.reader(url, view.source.folder), url


async def ready_index(
    request: Request, view: RunView
) -> tuple[IndexReader, tuple[IndexState, str]]:
    """The index of a run, after a short wait if it is new. Also its progress, and its problem.
    Raises ConfigError."""
    shared = dashboard(request)
    reader, url = await reader_of(request, view)
    until = time.monotonic() + FIRST_S
    state = await in_thread(shared.indexes.state, url)
    while not state[0].at and time.monotonic() < until:
        await asyncio.sleep(0.05)
        state = await in_thread(shared.indexes.state, url)

    return reader, state


def _selection(query: Mapping[str, str]) -> Selection:
    """Raises NotFoundError with the problem of the address."""
    try:
        return Selection.of(query)
    except ConfigError as error:
        raise NotFoundError(str(error)) from error


def _view(index: OpenIndex, selection: Selection, base: str) -> View:
    def link(**changes: Any) -> str:
        keys = selection.query(**changes)
        return f"{base}?{urlencode(keys)}" if keys else base

    choices = []
    if selection.task:
        word = selection.task, index.count(selection)[0], link(task=None)
        choices.append(AttemptChoice("Task", "task", selection.task, [word]))

    for name, title in TITLES.items():
        chosen = selection.choices.get(name, "")
        words = index.count_words(selection, name)
        if len(words) > 1 or chosen or (words and name in PARTIAL_FILTERS):
            links = [(w, n, link(**{name: None if w == chosen else w})) for w, n in words]
            choices.append(AttemptChoice(title, name, chosen, links))

    has = index.has_values(selection)
    orders = [
        (
            title,
            "" if name == selection.order else link(order=name if name != "newest" else None),
            "" if has[name] or name not in WHY_NOT else WHY_NOT[name],
        )
        for name, (_, _, title) in ORDERS.items()
    ]

    pictures = []
    for name, title in HISTOGRAMS:
        edges = (f"{name}_from", f"{name}_to")
        low, high = selection.ranges.get(name, (math.nan, math.nan))
        histogram_bars = index.histogram(selection, name)
        bars = []
        for bar in histogram_bars:
            # A value at an edge belongs to the bar that begins there. At the last edge, it belongs
            # to the last bar.
            highest = bar.high if bar is histogram_bars[-1] else math.nextafter(bar.high, -math.inf)
            href = link(**{edges[0]: exact(bar.low), edges[1]: exact(highest)})
            is_chosen = low <= bar.low and highest <= high
            bars.append(
                HistogramBar(bar.low, bar.high, bar.size, bar.good, href, is_chosen=is_chosen)
            )

        picture = histogram(title, bars, is_whole=name != "reward")
        back = link(**dict.fromkeys(edges)) if name in selection.ranges else ""
        pictures.append((title, picture, back))

    return View(selection, choices, orders, pictures, *index.count(selection))


@router.get("/runs/{run}/attempts", response_class=HTMLResponse)
async def attempts(request: Request, run: str) -> HTMLResponse:
    """All attempts of a run, filtered, sorted and searched."""
    view = await run_of(request, run)
    selection = _selection(request.query_params)
    base = run_url(run, "attempts")
    facts = await read_task_facts(request, view, [selection.task] if selection.task else [])
    task = facts.get(selection.task)

    def read(index: OpenIndex) -> Listing:
        return index.listing(selection)

    return await _answer(request, view, "attempts.html", read, selection, base, task=task)


@router.get("/runs/{run}/steps/{step}", response_class=HTMLResponse)
async def step(request: Request, run: str, step: int) -> HTMLResponse:
    """A step: its groups side by side."""
    view = await run_of(request, run)
    query = dict(request.query_params) | {"step": str(step)}
    after = query.pop("after", None)
    selection = _selection(query)
    base = run_url(run, "steps", step)
    facts = await _step_facts(request, view, step)

    def read(index: OpenIndex) -> _StepGroups:
        groups, next_after, total = index.step_groups(selection, after=after)
        return _StepGroups(
            [_group(rows) for rows in groups],
            None
            if next_after is None
            else f"{base}?{urlencode(selection.query(after=next_after))}",
            total,
            facts,
        )

    return await _answer(request, view, "step.html", read, selection, base, step=step)


class AttemptGroup(NamedTuple):
    """The attempts of a task, side by side."""

    id: str
    rows: list[IndexRow]
    mean: float
    spread: float
    successes: int
    why: str
    """Why the attempt was not trained on. Empty if it was, or still can be."""


class _StepGroups(NamedTuple):
    groups: list[AttemptGroup]
    next: str | None
    total: int
    facts: dict[str, Any]


def _group(rows: Sequence[IndexRow]) -> AttemptGroup:
    rewards = [row.reward for row in rows if row.status == "completed"]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)) if rewards else 0.0
    reasons = sorted({row.drop_reason for row in rows if row.drop_reason})

    return AttemptGroup(
        rows[0].group_id,
        list(rows),
        mean,
        spread,
        sum(row.success for row in rows),
        ", ".join(reasons),
    )


async def _step_facts(request: Request, view: RunView, step: int) -> dict[str, Any]:
    """The facts of a committed step from its record, and the numbers of the steps before and after
    it. None for what has no record."""
    names = ("committed_at", "num_trained", "masked_tokens", "before", "after")
    facts: dict[str, Any] = dict.fromkeys(names)
    facts["dropped"] = {}
    with suppress(AgentEvoError, TimeoutError):  # the page shows the index's rows
        async with dashboard(request).stores.reading(view.source) as store:
            for record in await store.steps(after=step - 2, limit=3):
                if record.step == step - 1:
                    facts["before"] = record.step
                elif record.step == step + 1:
                    facts["after"] = record.step
                elif record.step == step:
                    facts["committed_at"] = record.committed_at
                    facts["num_trained"] = record.num_trajectories
                    facts |= _plan_facts(record.record.get("plan"))

    return facts


def _plan_facts(plan: object) -> dict[str, Any]:
    if not isinstance(plan, dict):
        return {}
    dropped = plan.get("dropped")
    counts = {why: len(ids) for why, ids in dropped.items()} if isinstance(dropped, dict) else {}
    return {"dropped": counts, "masked_tokens": plan.get("masked_tokens")}


async def read_index(reader: IndexReader, read: Callable[[OpenIndex], T]) -> T | None:
    """What `read` finds in the index. None before the index exists."""

    def work() -> T:
        with reader.open() as index:
            return read(index)

    with suppress(IndexUnavailableError):
        return await in_thread(work)
    return None


async def _answer(
    request: Request,
    view: RunView,
    template: str,
    read: Callable[[OpenIndex], Any],
    selection: Selection,
    base: str,
    **variables: Any,
) -> HTMLResponse:
    """The page. Without an index, it shows the progress of the index."""
    reader, (state, trouble) = await ready_index(request, view)
    content = None
    if state.at:
        content = await read_index(
            reader, lambda index: (_view(index, selection, base), read(index))
        )

    shown, listed = content or (None, None)
    return run_page(
        request,
        template,
        view,
        "attempts",
        shown=shown,
        found=listed,
        index=state,
        trouble=trouble,
        selection=selection,
        base=base,
        kept=_form_keys(selection),
        **variables,
    )


def _form_keys(selection: Selection) -> dict[str, str]:
    """The values that a form of the page keeps in addition to its own fields."""
    free = msgspec.structs.replace(selection, text="", after=None)
    return {name: value for name, value in free.query().items() if name != "step"}


@router.get("/runs/{run}/attempts/state", response_class=HTMLResponse)
async def index_state(request: Request, run: str) -> HTMLResponse:
    """The progress of the index. The page polls it until the index is complete."""
    view = await run_of(request, run)
    _, url = await reader_of(request, view)
    state, trouble = await in_thread(dashboard(request).indexes.state, url)
    if not is_part(request):
        raise NotFoundError("This is a part of the page of attempts.")
    return part("index_state.html", index=state, trouble=trouble, view=view)
