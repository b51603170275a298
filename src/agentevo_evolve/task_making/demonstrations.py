"""Conversations that solve generated tasks, for `agentevo sft`. They use the calls and results that
were recorded when the task was made. For a task from documents, they search for words of the
question with the agent's tool and corpus.

A task is left out if its passage is not in the search results, because a model should not learn to
answer without having read the passage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from agentevo.agents.tools.corpus import Passage
from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS
from agentevo.config.tools import ToolSection
from agentevo.inference.remote_models.model import RemoteModel
from agentevo.runtime.event_loop import run_coroutine
from agentevo_evolve.task_making.calls import ToolWorld, call_tool
from agentevo_evolve.task_making.documents import search_query
from agentevo_evolve.task_making.scenario import WRITTEN, ScenarioStep, steps_of
from agentevo_evolve.task_making.server_tasks import MadeTasks
from agentevo_evolve.task_making.writer import reword_tasks

DONE = "Done."
SEARCH = "search"


def demonstration(
    row: Mapping[str, Any], specs: Sequence[Mapping[str, Any]], system: str = ""
) -> dict[str, Any]:
    """The conversation that solves a task. `specs`: the tools in OpenAI's form. `system`: the
    agent's system message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": row["query"]})
    for number, step in enumerate(steps_of(row)):
        arguments = json.dumps(step.arguments, ensure_ascii=False)
        call = {
            "id": f"call_{number + 1}",
            "type": "function",
            "function": {"name": step.tool, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": step.result})

    messages.append({"role": "assistant", "content": str(row.get("answer") or DONE)})
    return {"messages": messages, "tools": list(specs)}


def finish_tasks(
    tasks: MadeTasks, writer: RemoteModel | None, *, seed: int, num_shown: int, system: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rewords the tasks of a server with the writer, which is closed, except those that it has
    proposed. Returns their account, and `num_shown` conversations that solve random training tasks.
    `system`: the agent's system message. Raises AgentEvoError if the writer never replies."""
    account = {**tasks.account, "seed": seed}
    if writer is not None:
        rows = [*tasks.train, *tasks.held_out]
        from_walks = [row for row in rows if WRITTEN not in row]
        with closing(writer):
            work = reword_tasks(from_walks, writer, tasks.survey.names, seed=seed)
            reworded, account["writer"] = run_coroutine(work)

        rows_by_id = {row["id"]: row for row in [*rows, *reworded]}
        tasks.train = [rows_by_id[row["id"]] for row in tasks.train]
        tasks.held_out = [rows_by_id[row["id"]] for row in tasks.held_out]

    draw = random.Random(f"demonstrations-{seed}")
    shown = [
        demonstration(draw.choice(tasks.train), tasks.survey.specs, system)
        for _ in range(num_shown if tasks.train else 0)
    ]
    return account, shown


async def show_lookups(
    rows: Sequence[Mapping[str, Any]],
    passages: Sequence[Passage],
    sections: Sequence[ToolSection],
    *,
    count: int,
    seed: int,
    system: str = "",
) -> tuple[list[dict[str, Any]], int]:
    """`count` conversations about random `rows`, and the number of rows whose passage the search
    does not return. `sections`: the configuration of the tool `search`. `system`: the agent's
    system message. Raises ConfigError if the tool can't be created."""
    if not count:
        return [], 0

    texts = {passage.id: " ".join(passage.text.split()) for passage in passages}
    world = ToolWorld(sections)
    findable = list[dict[str, Any]]()
    try:
        async with world.open(0) as tools:
            specs = list(tools.schemas)
            for row in rows:
                query = search_query(str(row["query"]))
                answered = await call_tool(tools, SEARCH, {"query": query})
                if texts[row["passage"]] in " ".join(answered.text.split()):
                    step = ScenarioStep(
                        tool=SEARCH, arguments={"query": query}, result=answered.text
                    )
                    findable.append({**row, SOLVED_BY_CALLS: msgspec.to_builtins([step])})
    finally:
        await world.close()

    draw = random.Random(f"demonstrations-{seed}")
    shown = [
        demonstration(draw.choice(findable), specs, system) for _ in range(count if findable else 0)
    ]
    return shown, len(rows) - len(findable)
