"""A lesson: tasks for one tool, and a solver for them.

Tasks are random with a seed. A hash of each query decides whether it is held out (a share of
HELD_OUT), so a query is never both trained on and held out, whatever the seeds and counts.

Demonstrations use the real tools: a solver makes its calls, reads their results, and gives its
answer. `quits` is the share of its steps at which it stops instead, so that a policy trained on
them can still learn from reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentevo.agents.tools.toolbox import AttemptTools, Toolbox
from agentevo.config.tools import FunctionToolSection
from agentevo.errors import AgentEvoError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

HELD_OUT = 0.2
AT_ONCE = 16
GIVES_UP = "I do not know."
_TRIES = 2000
"""The search for tasks ends after this many known random tasks in a row."""


@dataclass(frozen=True)
class LessonCall:
    """A step of a solver: a call of one tool."""

    name: str
    arguments: Mapping[str, Any]


class Lesson(ABC):
    """See the module."""

    tool: ClassVar[str]
    """The name of the tool."""
    instructions: ClassVar[str]
    """The system message."""
    rewards: ClassVar[Sequence[str]] = ()
    """The names of the rewards that judge the answer. Empty if the reward depends on the tool's
    state."""

    @abstractmethod
    def draw(self, draw: random.Random) -> dict[str, Any]:
        """A random task: `query`, `answer` (if the answer is judged), and the tool's metadata."""

    @abstractmethod
    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        """The solver's next step after these results: a call, or the answer."""

    def corpus(self) -> list[dict[str, str]]:
        """The passages for the tool; empty if it needs none."""
        return []


def lesson_tasks(
    lesson: Lesson, count: int, seed: int, *, held_out: bool = False
) -> list[dict[str, Any]]:
    """`count` different tasks, as rows of a file of tasks. Raises AgentEvoError if the lesson has
    fewer."""
    draw = random.Random(f"{lesson.tool}-{seed}-{held_out}")
    rows: dict[str, dict[str, Any]] = {}
    num_misses = 0
    while len(rows) < count and num_misses < _TRIES:
        row = lesson.draw(draw)
        num_misses += 1
        if is_held_out(row["query"]) == held_out and json.dumps(row) not in rows:
            rows[json.dumps(row)] = row
            num_misses = 0

    if len(rows) < count:
        raise AgentEvoError(
            f"the lesson {lesson.tool} has fewer than {count:,} different tasks: use fewer"
        )

    part = "eval" if held_out else "train"
    return [
        {"id": f"{lesson.tool}-{part}-{seed}-{number}", **row}
        for number, row in enumerate(rows.values())
    ]


def is_held_out(query: str) -> bool:
    """Whether a task with this query is only for evaluation."""
    return hashlib.sha256(query.encode()).digest()[0] < 256 * HELD_OUT


def demonstrations(
    lesson: Lesson,
    tasks: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    quits: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """One conversation for each task, as rows for `agentevo sft`. `options`: those of the tool.
    Raises AgentEvoError for a completed conversation that does not score 1."""
    yield from run_coroutine(_demonstrate(lesson, tasks, seed, quits, dict(options or {})))


async def _demonstrate(
    lesson: Lesson,
    tasks: Sequence[Mapping[str, Any]],
    seed: int,
    quits: float,
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    toolbox = Toolbox([FunctionToolSection(name=lesson.tool, options=options)])
    room = asyncio.Semaphore(AT_ONCE)

    async def demonstrate(row: Mapping[str, Any]) -> dict[str, Any]:
        draw = random.Random(f"{seed}-{row['id']}")
        async with room, asyncio.timeout(60), toolbox.open(task_of_row(row), seed) as tools:
            return await _play(lesson, row, tools, draw, quits)

    try:
        return list(await asyncio.gather(*map(demonstrate, tasks)))
    finally:
        await toolbox.close()


async def _play(
    lesson: Lesson, row: Mapping[str, Any], tools: AttemptTools, draw: random.Random, quits: float
) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": lesson.instructions},
        {"role": "user", "content": row["query"]},
    ]
    results: list[str] = []
    while True:
        step = lesson.step(row, results)
        if isinstance(step, LessonCall) and draw.random() < quits:
            step = GIVES_UP
        if isinstance(step, str):
            break

        arguments = json.dumps(dict(step.arguments))
        (result,) = await tools.call([ToolCall(step.name, arguments)])
        results.append(result.text)
        function = {"name": step.name, "arguments": arguments}
        call = {"id": f"call_{len(results)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})

    worth = (await tools.outcomes()).get(lesson.tool, 1.0)
    if step != GIVES_UP and worth != 1.0:
        raise AgentEvoError(f"the lesson {lesson.tool} does not solve {row['id']}: {results}")

    messages.append({"role": "assistant", "content": step})
    return {"messages": messages, "tools": tools.schemas}


def task_of_row(row: Mapping[str, Any]) -> Task:
    """The task of a row, as in a file of tasks: other keys are metadata."""
    fields = ("id", "query", "answer")
    metadata = {key: value for key, value in row.items() if key not in fields}
    return Task(id=row["id"], query=row["query"], answer=row.get("answer"), metadata=metadata)
