"""Conversations that solve tasks made of documents, for `agentevo sft`: the passage is searched for
by words of the question, with the tool and the corpus that the agent has, and the answer is said.

A task whose passage is not in what the search gives is not shown: nobody should learn to say what
it has not read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentevo.config.tools import ToolSection
from agentevo.task_making.calls import World, asked
from agentevo.task_making.demonstrations import demonstration
from agentevo.task_making.documents import what_to_look_for
from agentevo.task_making.scenario import CALLS, Step
from agentevo.tools.corpus import Passage

SEARCH = "search"


async def looked_up(
    rows: Sequence[Mapping[str, Any]],
    passages: Sequence[Passage],
    sections: Sequence[ToolSection],
    *,
    count: int,
    seed: int,
    system: str = "",
) -> tuple[list[dict[str, Any]], int]:
    """`count` conversations about drawn `rows`, and how many rows no search finds. `sections`: the
    tool `search`; `system`: the agent's system message. Raises ConfigError for a tool that can't be
    made."""
    if not count:
        return [], 0

    texts = {one.id: " ".join(one.text.split()) for one in passages}
    world = World(sections)
    found = list[dict[str, Any]]()
    try:
        async with world.open(0) as tools:
            specs = list(tools.schemas)
            for row in rows:
                query = what_to_look_for(str(row["query"]))
                answered = await asked(tools, SEARCH, {"query": query})
                if texts[row["passage"]] in " ".join(answered.text.split()):
                    step = Step(tool=SEARCH, arguments={"query": query}, result=answered.text)
                    found.append({**row, CALLS: msgspec.to_builtins([step])})
    finally:
        await world.close()

    draw = random.Random(f"demonstrations-{seed}")
    shown = [demonstration(draw.choice(found), specs, system) for _ in range(count if found else 0)]
    return shown, len(rows) - len(found)
