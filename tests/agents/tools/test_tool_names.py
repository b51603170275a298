"""Names that APIs and templates take, whatever tools are called: each another one, always the
same."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager

import pytest

from agentevo.agents.tools import toolbox
from agentevo.agents.tools.tool import ToolResult, ToolSpec
from agentevo.config.tools import FunctionToolSection
from agentevo.types import Task, ToolCall


class _Tools:
    """A toolset whose tools say their own names."""

    has_outcome = False
    instructions = ""
    num_losses = 0

    def __init__(self, name, tools):
        self.name = name
        self.specs = [ToolSpec(name=tool, parameters={"type": "object"}) for tool in tools]

    @asynccontextmanager
    async def session(self, task, seed):
        yield self

    async def prepare(self):
        pass

    async def call(self, name, arguments):
        return ToolResult(text=f"{self.name}/{name}")

    async def outcome(self):
        return None

    async def close(self):
        pass


@pytest.fixture
def named(monkeypatch):
    """The policy's name of each tool -> what it calls."""

    def named(**toolsets):
        made = [_Tools(name, tools) for name, tools in toolsets.items()]
        monkeypatch.setattr(toolbox, "make_toolsets", lambda section: made)

        async def work():
            box = toolbox.Toolbox([FunctionToolSection(name="any")])
            async with box.open(Task(id="t"), 0) as tools:
                names = [schema["function"]["name"] for schema in tools.schemas]
                results = await tools.call([ToolCall(name, "{}") for name in names])
            return dict(zip(names, [result.text for result in results], strict=True))

        return asyncio.run(work())

    return named


def test_names_that_become_the_same_have_numbers_and_whoever_is_called_so_keeps_it(named):
    assert named(s=["a.b", "a_b", "a b", "c"]) == {
        "a_b_2": "s/a.b",
        "a_b": "s/a_b",
        "a_b_3": "s/a b",
        "c": "s/c",
    }
    assert named(s=["a.b", "a_b_2", "a_b"]) == {
        "a_b_3": "s/a.b",
        "a_b_2": "s/a_b_2",
        "a_b": "s/a_b",
    }


def test_names_without_a_letter_that_is_taken_have_numbers(named):
    assert named(s=["查询", "搜索", "...", "查询x"]) == {
        "tool": "s/查询",
        "tool_2": "s/搜索",
        "tool_3": "s/...",
        "__x": "s/查询x",
    }


def test_long_names_are_cut_and_stay_different(named):
    tools = ["x" * 70 + end for end in ("one", "two", ".", "_")]
    found = named(s=[*tools, "y" * 64])
    assert list(found.values()) == [f"s/{tool}" for tool in [*tools, "y" * 64]]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in found)
    assert list(found)[4] == "y" * 64
    assert list(named(s=tools[1:2])) == list(found)[1:2]  # whatever else there is


def test_names_of_two_toolsets_begin_with_them(named):
    assert named(s=["find", "a.b", "a_b"], t=["find", "查"]) == {
        "s__find": "s/find",
        "a_b_2": "s/a.b",
        "a_b": "s/a_b",
        "t__find": "t/find",
        "tool": "t/查",
    }
    long = "z" * 60
    found = named(server_one=[long], server_two=[long])
    assert len(found) == 2 and all(len(name) <= 64 for name in found)
    assert [name.partition("__")[0] for name in found] == ["server_one", "server_two"]
