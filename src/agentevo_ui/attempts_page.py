"""Lists of attempts: `/runs/{run}/attempts` (all of them), and `/runs/{run}/steps/{step}` (a step's
groups). Both read only the index."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from agentevo.errors import ConfigError
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
)
from agentevo_ui.index.selection import ORDERS, Selection, exact
from agentevo_ui.run_page import run_page
from agentevo_ui.task_facts import read_task_facts

router = APIRouter()

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


def _view(reader: IndexReader, selection: Selection, base: str) -> View:
    def link(**changes: Any) -> str:
        keys = selection.query(**changes)
        return f"{base}?{urlencode(keys)}" if keys else base

    choices = []
    if selection.task:
        choices.append(
            AttemptChoice("Task", "task", selection.task, [_task(reader, selection, link)])
        )

    for name, title in TITLES.items():
        chosen = selection.choices.get(name, "")
        words = reader.words(selection, name)
        if len(words) > 1 or chosen or (words and name in PARTIAL_FILTERS):
            links = [(w, n, link(**{name: None if w == chosen else w})) for w, n in words]
            choices.append(AttemptChoice(title, name, chosen, links))

    has = reader.has_values(selection)
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
        histogram_bars = reader.histogram(selection, name)
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

    return View(selection, choices, orders, pictures, *reader.count(selection))


@router.get("/runs/{run}/attempts", response_class=HTMLResponse)
async def attempts(request: Request, run: str) -> HTMLResponse:
    """All attempts of a run, filtered, sorted and searched."""
    view = await run_of(request, run)
    reader, _ = await reader_of(request, view)
    selection = _selection(request.query_params)
    base = run_url(run, "attempts")

    def read() -> tuple[View, Listing]:
        with reader.steady():
            return _view(reader, selection, base), reader.listing(selection)

    facts = await read_task_facts(request, view, [selection.task] if selection.task else [])
    task = facts.get(selection.task)
    return await _answer(request, view, "attempts.html", read, selection, base, task=task)


@router.get("/runs/{run}/steps/{step}", response_class=HTMLResponse)
async def step(request: Request, run: str, step: int) -> HTMLResponse:
    """A step: its groups side by side."""
    view = await run_of(request, run)
    reader, _ = await reader_of(request, view)
    query = dict(request.query_params) | {"step": str(step)}
    after = query.pop("after", None)
    selection = _selection(query)
    base = run_url(run, "steps", step)

    def read() -> tuple[View, Any]:
        with reader.steady():
            groups, next_after, total = reader.step_groups(selection, after=after)
            shown = _view(reader, selection, base)
            return shown, _StepGroups(
                [_group(rows) for rows in groups],
                None
                if next_after is None
                else f"{base}?{urlencode(selection.query(after=next_after))}",
                total,
                _neighbours(reader, step),
            )

    return await _answer(request, view, "step.html", read, selection, base, step=step)


def _task(reader: IndexReader, selection: Selection, link: Any) -> tuple[str, int, str]:
    """The chosen task, with the number of selected attempts at it."""
    return selection.task, reader.count(selection)[0], link(task=None)


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


def _neighbours(reader: IndexReader, step: int) -> dict[str, Any]:
    """The committed steps before and after a step, and the step's facts."""
    steps = reader.steps()
    numbers = [row[0] for row in steps]
    current = next((row for row in steps if row[0] == step), None)
    return {
        "before": max((n for n in numbers if n < step), default=None),
        "after": min((n for n in numbers if n > step), default=None),
        "committed_at": current[1] if current else None,
        "num_trained": current[2] if current else None,
        "plan": current[3] if current else {},
    }


async def _answer(
    request: Request,
    view: RunView,
    template: str,
    read: Any,
    selection: Selection,
    base: str,
    **variables: Any,
) -> HTMLResponse:
    """The page. Without an index, it shows the progress of the index."""
    _, (state, trouble) = await ready_index(request, view)
    shown = None
    content = None
    with suppress(IndexUnavailableError):
        if state.at:
            shown, content = await in_thread(read)

    return run_page(
        request,
        template,
        view,
        "attempts",
        shown=shown,
        found=content,
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
