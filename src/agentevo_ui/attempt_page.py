"""A single attempt: `/runs/{run}/attempt?id=…` as messages or as tokens, in parts. Also two
attempts side by side, and the history of a token up to its gradient step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from agentevo.data.image_headers import ImageHeaderError, read_header
from agentevo.errors import AgentEvoError, ConfigError, UnusableStoreError
from agentevo.observability import attempt_diff, attempt_tokens, attempt_view
from agentevo.observability.attempt_tokens import Training
from agentevo.runs.folder.annotations import Annotations, read_annotations
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo.store.calls import StoredCall
from agentevo.store.records import StoredTrajectory
from agentevo_ui.attempt_training import TokenTools, tools_of, training_of
from agentevo_ui.attempts_page import read_index, reader_of
from agentevo_ui.context import NotFoundError, dashboard, part, run_of
from agentevo_ui.index.reader import IndexRow, OpenIndex
from agentevo_ui.run_page import run_page
from agentevo_ui.task_facts import read_task_facts

router = APIRouter()
T = TypeVar("T")

MAX_SIBLINGS = 64
WITHIN_S = 20.0
"""The time limit of a page in seconds."""


async def _attempt_of(
    request: Request, view: RunView, name: str
) -> tuple[StoredTrajectory, IndexRow | None]:
    """The attempt that a URL names, from the store, and its row in the index. Raises
    NotFoundError."""
    row = await _in_index(request, view, lambda index: index.find(name))

    async with dashboard(request).stores.reading(view.source) as store:
        if row is not None:
            for _, stored in await store.written(range(row.seq, row.seq + 1), limit=1):
                if stored.trajectory.id == name:
                    return stored, row

        try:
            trajectory = await store.trajectory(name)
        except AgentEvoError as error:
            raise NotFoundError(f"There is no attempt {name[:200]} in this run's store.") from error

        async for stored in store.trajectories(group_id=trajectory.group_id):
            if stored.trajectory.id == name:
                return stored, row

    raise NotFoundError(f"The attempt {name[:200]} was deleted just now.")


async def _in_index(request: Request, view: RunView, read: Callable[[OpenIndex], T]) -> T | None:
    reader, _ = await reader_of(request, view)
    return await read_index(reader, read)


async def _annotations(view: RunView) -> Annotations:
    """The annotations of the run's attempts. None if the run has no folder here."""
    folder = view.source.folder
    if folder is None:
        return Annotations({}, {}, ())
    async with asyncio.timeout(WITHIN_S):
        return await in_thread(read_annotations, folder)


async def _siblings(request: Request, view: RunView, row: IndexRow | None) -> list[IndexRow]:
    """The attempts of its group, including itself. None if the index has none."""
    if row is None:
        return []
    group_id = row.group_id
    rows = await _in_index(request, view, lambda index: index.group(group_id))
    return (rows or [])[:MAX_SIBLINGS]


async def _calls(request: Request, view: RunView, name: str) -> list[StoredCall]:
    async with dashboard(request).stores.reading(view.source) as store:
        return [
            call async for call in store.calls(trajectory_id=name, limit=2 * attempt_view.MAX_CALLS)
        ]


@router.get("/runs/{run}/attempt", response_class=HTMLResponse)
async def attempt(
    request: Request, run: str, id: str, show: str = "messages", leaf: int | None = None
) -> HTMLResponse:
    """The attempt, as messages or as tokens."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        stored, row = await _attempt_of(request, view, id)
        calls = await _calls(request, view, id)

        trajectory = stored.trajectory
        messages = None
        tokens = None
        tools = None
        if show == "tokens":
            tools = await tools_of(view)
            if tools is not None:
                tokens = await _tokens(request, view, stored, row, (0, 0), leaf, tools)
        else:
            messages = await in_thread(
                lambda: attempt_view.part_of(trajectory, calls, start=0, leaf=leaf)
            )

    siblings = await _siblings(request, view, row)
    facts = await read_task_facts(request, view, [trajectory.task_id])
    ends = attempt_view.leaves(trajectory.turns)
    return run_page(
        request,
        "attempt.html",
        view,
        "attempts",
        stored=stored,
        one=trajectory,
        task=facts.get(trajectory.task_id),
        row=row,
        siblings=siblings,
        show="tokens" if show == "tokens" else "messages",
        leaf=leaf,
        part=messages,
        tokens=tokens,
        shades=None if tokens is None else _shades(tokens),
        remote=attempt_view.remote_part(trajectory.remote_turns),
        timeline=attempt_view.timeline(calls),
        num_calls=len(calls),
        ending=attempt_view.ending(trajectory, calls),
        slips=attempt_view.rejected_replies(trajectory),
        limit=attempt_view.limit(trajectory, view.config),
        verdicts=attempt_view.verdicts(calls),
        tree=attempt_view.tree(trajectory.turns, leaf),
        leaves=ends if attempt_view.is_branched(trajectory.turns) else [],
        turn_rewards=[(t.index, t.reward) for t in trajectory.turns if t.reward][:60],
        files=[(path, len(data)) for path, data in list(trajectory.files.items())[:50]],
        can_decode=tools is None or tools.decode is not None,
        annotation=(await _annotations(view)).attempts.get(trajectory.id),
    )


async def _tokens(
    request: Request,
    view: RunView,
    stored: StoredTrajectory,
    row: IndexRow | None,
    start: tuple[int, int],
    leaf: int | None,
    tools: TokenTools,
) -> dict[str, Any]:
    """A part of the tokens, and why some of their numbers are missing."""
    async with dashboard(request).stores.reading(view.source) as store:
        training, why = await training_of(view, store, stored, row, tools.rule)

    page_part = await in_thread(
        lambda: attempt_tokens.tokens_part(
            stored.trajectory, tools.decode, training, start=start, leaf=leaf
        )
    )
    return {"turn_tokens": page_part, "why": why, "training": training}


def _shades(tokens: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The (name, title, why it can't be chosen) of each way to shade tokens."""
    blocks = tokens["turn_tokens"].blocks
    greedy = "every turn was greedy: nothing was sampled"
    has_logprobs = any(block.numbers["lp"] is not None for block in blocks)
    has_advantages = tokens["training"].advantages is not None
    why_not = "" if tokens["training"].entropies else _not_kept(tokens["training"])

    return [
        ("lp", "log-prob", "" if has_logprobs else greedy),
        ("adv", "advantage", "" if has_advantages else tokens["why"]),
        ("ver", "version", ""),
        ("on", "trained", ""),
        ("ent", "entropy", why_not),
        ("mov", "ratio", why_not),
    ]


def _not_kept(training: Training) -> str:
    """Why there are neither entropies nor ratios."""
    if training.step is None:
        return "only tokens that were trained have one"
    return (
        "the run stored none for this step: tracking.token_numbers was off, or its folder is not "
        "here; actor/entropy and actor/ppo_kl have the step's means"
    )


@router.get("/runs/{run}/image/{sha256}")
async def image(request: Request, run: str, sha256: str) -> Response:
    """An image of the run's store. Its bytes never change, because the digest names them."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S), dashboard(request).stores.reading(view.source) as store:
        try:
            file = await store.image(sha256)
            kind = read_header(file.data).media_type  # a store may name any other one
        except (UnusableStoreError, ImageHeaderError) as error:
            raise NotFoundError(f"There is no image {sha256[:64]} in this run's store.") from error

    headers = {"cache-control": "private, max-age=86400, immutable"}
    return Response(file.data, media_type=kind, headers=headers)


@router.get("/runs/{run}/attempt/turns", response_class=HTMLResponse)
async def turns(
    request: Request, run: str, id: str, start: int = 0, leaf: int | None = None
) -> HTMLResponse:
    """Further turns as messages."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        stored, _ = await _attempt_of(request, view, id)
        calls = await _calls(request, view, id)
        shown_turns = await in_thread(
            lambda: attempt_view.part_of(stored.trajectory, calls, start=max(start, 0), leaf=leaf)
        )

    end = attempt_view.ending(stored.trajectory, calls)
    return part(
        "attempt_turns.html",
        view=view,
        part=shown_turns,
        one=stored.trajectory,
        leaf=leaf,
        ending=end,
    )


@router.get("/runs/{run}/attempt/tokens", response_class=HTMLResponse)
async def tokens(
    request: Request, run: str, id: str, turn: int = 0, at: int = 0, leaf: int | None = None
) -> HTMLResponse:
    """Further tokens."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        stored, row = await _attempt_of(request, view, id)
        tools = await tools_of(view)
        if tools is None:
            raise TimeoutError
        start = (max(turn, 0), max(at, 0))
        shown_tokens = await _tokens(request, view, stored, row, start, leaf, tools)

    return part(
        "attempt_tokens.html", view=view, tokens=shown_tokens, one=stored.trajectory, leaf=leaf
    )


@router.get("/runs/{run}/attempt/text", response_class=HTMLResponse)
async def text(
    request: Request,
    run: str,
    id: str,
    turn: int,
    message: int,
    start: int = 0,
    remote: bool = False,
) -> HTMLResponse:
    """A further part of a long message. `remote`: whether the message is from a remote model's
    conversation."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        stored, _ = await _attempt_of(request, view, id)

    try:
        excerpt, rest = attempt_view.text_part(
            stored.trajectory, turn, message, start, is_remote=remote
        )
    except IndexError:
        raise NotFoundError(f"Turn {turn} has no message {message}.") from None

    after = start + attempt_view.MORE
    data = {"turn": turn, "message": message, "start": after, "remote": remote}
    return part(
        "attempt_text.html", view=view, one=stored.trajectory, text=excerpt, rest=rest, **data
    )


@router.get("/runs/{run}/attempt/token", response_class=HTMLResponse)
async def token(request: Request, run: str, id: str, turn: int, position: int) -> HTMLResponse:
    """The history of a token from sampling to its gradient step, as in `agentevo audit --token`."""
    from agentevo.runs.audit.token_history import follow

    view = await run_of(request, run)
    folder = view.source.folder
    async with asyncio.timeout(WITHIN_S), dashboard(request).stores.reading(view.source) as store:
        try:
            history = await follow(store, folder or Path(), id, turn, position)
        except ConfigError as error:
            raise NotFoundError(str(error)) from error

    return part("attempt_token.html", view=view, history=history, lines=history.lines())


@router.get("/runs/{run}/attempts/compare", response_class=HTMLResponse)
async def compare(request: Request, run: str, a: str, b: str) -> HTMLResponse:
    """Two attempts, side by side."""
    view = await run_of(request, run)
    async with asyncio.timeout(WITHIN_S):
        left_attempt, _ = await _attempt_of(request, view, a)
        right_attempt, _ = await _attempt_of(request, view, b)
        both = ((left_attempt, a), (right_attempt, b))
        sides = [(stored.trajectory, await _calls(request, view, name)) for stored, name in both]
        rows = await in_thread(attempt_diff.diff, *sides)

    return run_page(
        request,
        "attempts_diff.html",
        view,
        "attempts",
        left=left_attempt,
        right=right_attempt,
        rows=rows,
        slips=attempt_view.rejected_replies,
        limit=attempt_view.limit,
        preferred=(await _annotations(view)).pairs.get(frozenset((a, b))),
    )
