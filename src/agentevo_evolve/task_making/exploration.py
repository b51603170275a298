"""A survey of a server's tools with real calls. It finds the tools that return results, the tools
that change the state that others show, and the tools that refuse arguments that their own schema
allows.

Like attempts, calls run in sessions of their own. A tool is called with arguments from its schema,
then with values from other results. A tool that accepts SQL is queried for its tables
(databases.py). Every tool is then asked twice with nothing in between: a tool with two different
results is unstable by itself, and never shows whether another tool changes something (effects.py).

The hints of a server decide what is called. Tools that change nothing by their hints come first. A
tool that may delete or overwrite by its hints is called only if sessions are known not to share
their state. Hints are not trusted otherwise: a reader with two different results is no reader.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tools.tool import ToolSpec
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo.errors import ConfigError
from agentevo_evolve.task_making.calls import ToolWorld, call_tool
from agentevo_evolve.task_making.databases import find_database
from agentevo_evolve.task_making.effects import find_changing_tools
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.values import Values

MAX_TRIES = 10
"""The maximum number of calls of a tool until it returns a result."""
NUM_SAMPLES = 4
"""The number of further calls of each reader, with other arguments."""
MAX_TOOLS = 64
_SECONDS = re.compile(r"\d\d:\d\d:\d\d")
CLOCK_S = 1.1
"""The time in which a clock that shows seconds shows another one."""


async def explore_server(
    world: ToolWorld, named_values: Mapping[str, Sequence[Any]] | None = None, *, seed: int
) -> Survey:
    """Surveys the server. `named_values`: the user's values, by parameter. Raises
    ToolUnavailableError if the server can't be reached, and ConfigError if it has no tools, or if
    no tool returns a result."""
    draw = random.Random(f"survey-{seed}")
    async with world.open(0) as tools:
        specs = [tool_schema["function"] for tool_schema in tools.schemas]
        if len(specs) > MAX_TOOLS:
            raise ConfigError(
                f"the server has {len(specs)} tools, and tasks are made of {MAX_TOOLS} at most: "
                "choose some by --include"
            )

        surveyed = Survey(
            schemas={spec["name"]: spec["parameters"] for spec in specs},
            descriptions={spec["name"]: spec["description"] for spec in specs},
            specs=list(tools.schemas),
            values=Values(named_values),
        )
        surveyed.values.add("path", [word for word in world.words if os.path.isabs(word)])
        hints = {name: tools.specs[name] for name in surveyed.schemas}
        await _find_answers(tools, surveyed, hints, draw)
        await _find_unstable(tools, surveyed, hints)

    await find_changing_tools(world, surveyed, hints, draw)
    if not surveyed.answered:
        lines = "\n".join(f"{name}: {why}" for name, why in surveyed.unresponsive.items())
        raise ConfigError(
            "no tool of the server answers calls that its schema allows, so no task can be made: "
            f"correct its schemas, or give values by --value\n{lines}"
        )

    await _sample_readers(world, surveyed, draw)
    return surveyed


async def _find_answers(
    tools: AttemptTools, surveyed: Survey, hints: Mapping[str, ToolSpec], draw: random.Random
) -> None:
    """Calls the tools until each returns a result. Tools that change something by their hints wait
    for effects.py."""
    names = [name for name in surveyed.schemas if hints[name].changes_nothing is not False]
    for name in names:
        if database_and_call := await find_database(tools, name, surveyed.schemas[name]):
            surveyed.databases[name], surveyed.answered[name] = database_and_call

    for _ in range(MAX_TRIES):
        for name in names:
            if name not in surveyed.answered and name not in surveyed.left_out:
                await try_tool(tools, surveyed, name, draw)


async def try_tool(tools: AttemptTools, surveyed: Survey, name: str, draw: random.Random) -> None:
    """Calls a tool with random arguments. Its result, or its refusal, becomes a part of the
    survey."""
    arguments = surveyed.draw_arguments(name, draw)
    result = await call_tool(tools, name, arguments)
    surveyed.learn(result)
    surveyed.leave_out_if_slow(result)
    if result.is_error:
        words = ", ".join(f"{parameter}={value!r}" for parameter, value in arguments.items())
        surveyed.unresponsive[name] = f"{words[:200]} -> {' '.join(result.text.split())[:200]}"
        return

    surveyed.answered[name] = result
    surveyed.unresponsive.pop(name, None)


async def _find_unstable(
    tools: AttemptTools, surveyed: Survey, hints: Mapping[str, ToolSpec]
) -> None:
    """Asks every tool twice, with nothing in between; CLOCK_S later if a result has a time."""
    for name, answer in surveyed.answered.items():
        if name in surveyed.databases:  # tasks only select
            surveyed.readers.add(name)
            continue
        if name in surveyed.left_out:
            continue

        first = await call_tool(tools, name, answer.arguments)
        if _SECONDS.search(first.text):
            await asyncio.sleep(CLOCK_S)
        second = await call_tool(tools, name, answer.arguments)
        if first.text != second.text:
            surveyed.unstable.add(name)
        elif hints[name].changes_nothing:
            surveyed.readers.add(name)


async def _sample_readers(world: ToolWorld, surveyed: Survey, draw: random.Random) -> None:
    """Calls the readers with further arguments: their results show values, and which answers a tool
    always gives."""
    async with world.open(0) as tools:
        for _ in range(NUM_SAMPLES):
            for name in surveyed.read_only_tools:
                if name not in surveyed.databases:
                    arguments = surveyed.draw_arguments(name, draw)
                    surveyed.learn(await call_tool(tools, name, arguments))
