"""Calls that say what the state has to be after an attempt, at tools that judge nothing
themselves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from slow import soak

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config import build_config
from agentevo.config.mcp import MCPServerSection
from agentevo.config.tasks import TaskFields
from agentevo.config.tools import FunctionToolSection, tool
from agentevo.data import RowError
from agentevo.errors import EnvironmentFailure, ToolError
from agentevo.rollout.given_tasks import task_of
from agentevo.rollout.scoring import Scoring
from agentevo.types import Task, ToolCall

SERVER = str(Path(__file__).parents[2] / "support" / "mcp_server.py")


@pytest.fixture
def shelf():
    @tool("shelf")
    class Shelf:
        def __init__(self, task):
            self.places = dict(task.metadata.get("places", {}))

        def put(self, item: str, place: str) -> str:
            """Puts an item."""
            self.places[item] = place
            return "done"

        def where(self, item: str) -> str:
            """Says where an item is."""
            if item not in self.places:
                raise ToolError("nowhere")
            return self.places[item]

        def crash(self) -> str:
            """Fails."""
            raise RuntimeError("gone")

    return [FunctionToolSection(name="shelf")]


CHECKS = [
    {"tool": "where", "arguments": {"item": "cup"}, "result": "left"},
    {"tool": "where", "arguments": {"item": "jug"}, "result": "Error: nowhere"},
]


def worth(sections, calls, checks=CHECKS):
    async def attempt():
        box = Toolbox(sections, notify=lambda line: None)
        try:
            async with box.open(Task(id="t", metadata={"state_checks": checks}), 0) as tools:
                await tools.call([ToolCall(*call) for call in calls])
                before = dict(tools.metrics)
                outcomes = await tools.outcomes()
                assert dict(tools.metrics) == before  # they are no calls of the policy
                return outcomes
        finally:
            await box.close()

    return asyncio.run(attempt())


def test_an_attempt_is_worth_what_its_state_is(shelf):
    put = ("put", '{"item": "cup", "place": "left"}')
    assert worth(shelf, [put]) == {"state_checks": 1.0}
    assert worth(shelf, []) == {"state_checks": 0.0}
    assert worth(shelf, [put, ("put", '{"item": "jug", "place": "left"}')]) == {"state_checks": 0.0}


@pytest.mark.parametrize("name", ["crash", "unknown"])
def test_what_nobody_answers_fails_the_attempt_and_is_no_0(shelf, name):
    with pytest.raises(EnvironmentFailure, match="can't be checked"):
        worth(shelf, [], [{"tool": name, "result": "x"}])


@pytest.mark.parametrize(
    "checks", [[], {}, [{"tool": "where"}], [{"tool": 1, "result": ""}], [{"result": "x"}] * 65]
)
def test_checks_that_are_none_are_a_bad_row(shelf, checks):
    with pytest.raises(RowError, match="state_checks"):
        task_of({"query": "q", "state_checks": checks}, TaskFields())
    with pytest.raises(EnvironmentFailure, match="state_checks"):
        worth(shelf, [], checks)


@pytest.mark.slow
@pytest.mark.parametrize("session", ["attempt", *soak("shared")])
def test_a_server_that_was_started_again_is_not_judged(session, shelf):
    """Neither that what the calls had left is right, nor that what it begins with is. Another
    server's state is what its calls left."""
    pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
    entry = MCPServerSection(
        name="c", command=sys.executable, args=(SERVER,), timeout_s=300, session=session
    )
    add = ("add", '{"number": 1}')
    die = ("die", "{}")
    checks = [{"tool": "worth", "result": '{"count": 1}'}]
    assert worth([entry], [add], checks) == {"state_checks": 1.0}
    for calls in ([add, add, die, add], [add, die, ("worth", "{}")], [add, die]):
        with pytest.raises(EnvironmentFailure, match="'c' was restarted during the attempt"):
            worth([entry], calls, checks)

    put = ("put", '{"item": "cup", "place": "left"}')
    assert worth([*shelf, entry], [add, die, add, put]) == {"state_checks": 1.0}


def test_a_task_with_checks_needs_no_reward(shelf):
    tasks = [Task(id="t", query="q", metadata={"state_checks": CHECKS})]
    config = build_config(
        {"tasks": "x.jsonl", "agent": {"type": "tool_agent", "tools": ["shelf"]}},
    )
    Scoring(config.rewards).check(tasks, needed=True)
