"""Calls of registered tools, through the toolbox."""

from __future__ import annotations

import json

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config import tools as tool_config
from agentevo.config.tools import FunctionToolSection
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall


def _names():
    """Those of the test's own."""
    return sorted(tool_config.tools._items)


def called(*calls, sections=None, told=None, **options):
    """(results, metrics, outcomes) of calls, each (name, arguments or text), made at once with the
    registered tools."""
    entries = sections or [FunctionToolSection(name=name, **options) for name in _names()]

    async def work():
        box = Toolbox(entries, [].append if told is None else told.append)
        async with box.open(Task(id="t", metadata={"start": 4}), seed=3) as tools:
            results = await tools.call(
                [
                    ToolCall(name, given if isinstance(given, str) else json.dumps(given))
                    for name, given in calls
                ]
            )
            outcomes = await tools.outcomes()

        await box.close()
        return results, tools.metrics, outcomes

    return run_coroutine(work())


def schemas():
    async def work():
        entries = [FunctionToolSection(name=name) for name in _names()]
        async with Toolbox(entries).open(Task(id="t"), seed=0) as tools:
            return {schema["function"]["name"]: schema["function"] for schema in tools.schemas}

    return run_coroutine(work())
