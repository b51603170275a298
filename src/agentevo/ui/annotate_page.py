"""What people say of attempts: forms on an attempt's page and on that of two, and
`/runs/{run}/annotations`, the list of it all with how far rewards agree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from agentevo.event_loop import in_thread
from agentevo.pages.navigation import run_url
from agentevo.runs.annotation_export import FORMATS, last_answer
from agentevo.runs.annotations import (
    MAX_NOTE,
    MAX_REPLY,
    Annotation,
    Annotations,
    Preference,
    Record,
    annotate,
    as_row,
    calibration,
    read_annotations,
)
from agentevo.runs.labelling import annotation_of, preference_of
from agentevo.runs.records import RecordTooLongError
from agentevo.types import Trajectory
from agentevo.ui.attempt_loading import load_attempt
from agentevo.ui.changes import WRITE_S, RequestedChange, changes, see
from agentevo.ui.context import NotFoundError, WrongFormError, run_of
from agentevo.ui.run_page import run_page
from agentevo.ui.run_state import RunView

router = APIRouter()

SHOWN = 200
"""Rows of a page."""
SHOWS = ("all", "right", "wrong", "edited", "noted", "disagree", "pairs")


async def annotations_of(view: RunView) -> Annotations:
    """All of a run; none where it has no folder. Raises ConfigError."""
    folder = view.source.folder
    if folder is None:
        return Annotations({}, {}, ())
    async with asyncio.timeout(WRITE_S):
        return await in_thread(read_annotations, folder)


async def annotation_facts(view: RunView, trajectory: Trajectory) -> dict[str, Any]:
    """What `annotate.html` shows of one attempt."""
    found = await annotations_of(view)
    history = [
        one for one in found.history if isinstance(one, Annotation) and one.attempt == trajectory.id
    ]
    return {
        "said": found.attempts.get(trajectory.id),
        "num_said": len(history),
        "last_reply": last_reply(trajectory),
        "is_annotatable": view.source.folder is not None,
    }


def last_reply(trajectory: Trajectory) -> str | None:
    """The text that may be edited; None where there is none, or it is longer than a form takes."""
    last = last_answer(trajectory)
    text = last.messages[-1].text if last is not None and last.messages else None
    return text if text is not None and len(text) <= MAX_REPLY else None


async def save(view: RunView, record: Record) -> None:
    """Adds it. Raises NotFoundError where the run has no folder here, WrongFormError for what is
    too long, ConfigError for a disk that doesn't take it."""
    folder = view.source.folder
    if folder is None:
        raise NotFoundError("This run has no folder here, which annotations would lie in.")

    try:
        async with asyncio.timeout(WRITE_S):
            await in_thread(annotate, Path(folder), record)
    except RecordTooLongError as error:  # a control character has six bytes in a line of JSON
        raise WrongFormError(f"This is too long to be kept: {error}.") from error


def annotation_from(change: RequestedChange, trajectory: Trajectory) -> Annotation:
    """What a form says of an attempt. Raises WrongFormError for what can't be kept."""
    verdict = change.get("verdict")
    note = change.get("note")
    reply = change.get("reply")

    if verdict not in ("", "right", "wrong"):
        raise WrongFormError("A verdict is right, wrong, or none.")

    if len(note) > MAX_NOTE or len(reply) > MAX_REPLY:
        raise WrongFormError(
            f"A note has at most {MAX_NOTE:,} characters, an edited reply {MAX_REPLY:,}."
        )

    original = last_reply(trajectory)
    # A browser sends every newline as \r\n and leaves out one at the beginning.
    is_edited = original is not None and reply.strip() and _plain(reply) != _plain(original)
    return annotation_of(
        trajectory,
        who=change.visitor.who,
        address=change.visitor.address,
        id=change.id,
        verdict=verdict,
        note=note,
        reply=reply if is_edited else None,
    )


def preference_from(change: RequestedChange, left: Trajectory, right: Trajectory) -> Preference:
    """What a form says of two attempts: `better` is the id of one, or empty for neither."""
    better = change.get("better")
    if better not in ("", left.id, right.id):
        raise WrongFormError("The better one is one of these two, or neither.")
    visitor = change.visitor
    return preference_of(
        better, left, right, who=visitor.who, address=visitor.address, id=change.id
    )


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")


@router.get("/runs/{run}/annotations", response_class=HTMLResponse)
async def listed(request: Request, run: str, show: str = "all", q: str = "") -> HTMLResponse:
    """The list, with filters."""
    view = await run_of(request, run)
    found = await annotations_of(view)
    rows = [one for one in reversed(found.attempts.values()) if _fits(one, show, q)]
    pairs = [one for one in reversed(found.pairs.values()) if show in ("all", "pairs")]

    return run_page(
        request,
        "annotations.html",
        view,
        "annotations",
        rows=rows[:SHOWN],
        num=len(rows),
        pairs=pairs[:SHOWN],
        num_pairs=len(pairs),
        total=len(found.attempts) + len(found.pairs),
        agreements=[as_row(one) for one in calibration(found)],
        shows=SHOWS,
        show=show if show in SHOWS else "all",
        q=q,
        formats=FORMATS,
    )


def _fits(one: Annotation, show: str, q: str) -> bool:
    if q and q.casefold() not in f"{one.note}\n{one.attempt}\n{one.task}".casefold():
        return False

    return {
        "right": one.verdict == "right",
        "wrong": one.verdict == "wrong",
        "edited": one.reply is not None,
        "noted": bool(one.note),
        "disagree": bool(one.verdict) and (one.verdict == "right") != one.success,
        "pairs": False,
    }.get(show, True)


@router.post("/runs/{run}/annotate")
async def annotate_attempt(request: Request, run: str) -> Response:
    """Keeps what a form says of the attempt `attempt`."""
    view = await run_of(request, run)
    change = changes(request)
    stored, _ = await load_attempt(request, view, change.get("attempt"))
    await save(view, annotation_from(change, stored.trajectory))
    return see(f"{run_url(view.key, 'attempt')}?{_query(id=stored.trajectory.id)}#annotate")


@router.post("/runs/{run}/prefer")
async def prefer(request: Request, run: str) -> Response:
    """Keeps which of the attempts `a` and `b` is better."""
    view = await run_of(request, run)
    change = changes(request)
    left, _ = await load_attempt(request, view, change.get("a"))
    right, _ = await load_attempt(request, view, change.get("b"))
    if left.trajectory.id == right.trajectory.id:
        raise WrongFormError("These are the same attempt.")

    await save(view, preference_from(change, left.trajectory, right.trajectory))
    names = {"a": left.trajectory.id, "b": right.trajectory.id}
    return see(f"{run_url(view.key, 'attempts', 'compare')}?{_query(**names)}")


def _query(**values: str) -> str:
    return urlencode(values)
