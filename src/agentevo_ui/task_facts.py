"""The facts of a task for the pages of attempts and of data: query, expected answer, judge and
metadata. This module shortens texts, and the templates escape them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from fastapi import Request

from agentevo.data.messages import messages_of
from agentevo.errors import AgentEvoError
from agentevo.runs.folder.run_state import RunView
from agentevo.types import QUERY_MESSAGES, QUEUED_ATTEMPTS, QUEUED_FOR_STEP, Task
from agentevo_ui.context import dashboard

WITHIN_S = 5.0
MAX_TEXT = 8_000
"""The maximum number of characters of a query or an answer."""
MAX_VALUE = 400
"""The maximum number of characters of a value of the metadata."""
MAX_VALUES = 40


class TaskFacts(NamedTuple):
    """The facts of a task. A text is empty if the task has none."""

    query: str
    answer: str
    origin: str
    """Environment and seed, or the judge."""
    metadata: list[tuple[str, str]]
    num_more: int
    """The number of further keys of the metadata."""


def task_facts(task: Task) -> TaskFacts:
    """The facts of a task that pages show."""
    origin = []
    if task.environment is not None:
        origin.append(f"environment {task.environment}, seed {task.seed}")
    if task.scorer is not None:
        origin.append(f"judged by {task.scorer}")

    hidden = (QUERY_MESSAGES, QUEUED_FOR_STEP, QUEUED_ATTEMPTS)
    pairs = [(key, value) for key, value in task.metadata.items() if key not in hidden]
    return TaskFacts(
        query=_query(task),
        answer="" if task.answer is None else _text(task.answer, MAX_TEXT),
        origin="; ".join(origin),
        metadata=[(str(key), _text(value, MAX_VALUE)) for key, value in pairs[:MAX_VALUES]],
        num_more=max(len(pairs) - MAX_VALUES, 0),
    )


async def read_task_facts(
    request: Request, view: RunView, ids: Iterable[str]
) -> dict[str, TaskFacts]:
    """Maps a task's id to its facts, for the tasks that the run's store returns within WITHIN_S
    seconds. A page shows no facts of other tasks."""
    facts: dict[str, TaskFacts] = {}
    names = list(dict.fromkeys(ids))
    if not names:
        return facts

    with suppress(AgentEvoError, TimeoutError):  # the page says elsewhere what is unreachable
        async with (
            asyncio.timeout(WITHIN_S),
            dashboard(request).stores.reading(view.source) as store,
        ):
            for name in names:
                with suppress(AgentEvoError):  # a program with its own loop may store no tasks
                    facts[name] = task_facts(await store.task(name))

    return facts


def _query(task: Task) -> str:
    chat = task.metadata.get(QUERY_MESSAGES)
    if not chat:
        return _cut(task.query or "", MAX_TEXT)
    try:
        return _cut(
            "\n".join(f"{message.role}: {message.text}" for message in messages_of(chat)), MAX_TEXT
        )
    except AgentEvoError:
        return _text(chat, MAX_TEXT)


def _text(value: Any, limit: int) -> str:
    """A text unchanged, any other value as JSON."""
    if isinstance(value, str):
        return _cut(value, limit)
    return _cut(json.dumps(value, ensure_ascii=False, default=str), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"
