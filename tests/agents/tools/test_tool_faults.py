"""Tools that hang, break, or say what no policy can read."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from called_tools import called, schemas

from agentevo.agents.tools.tool import ToolResult, ToolSpec
from agentevo.agents.tools.toolbox import Toolbox, _OfferedToolset
from agentevo.config.tools import FunctionToolSection, tool
from agentevo.errors import ConfigError, EnvironmentFailure, ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall


@pytest.mark.slow
def test_a_call_that_is_given_up_before_it_began_is_never_made():
    goes_on = threading.Event()
    made = []
    closed = threading.Event()

    @tool("world")
    class World:
        def act(self, number: int) -> str:
            made.append(number)
            goes_on.wait(300)
            return "done"

        def close(self):
            closed.set()

    async def work():
        box = Toolbox([FunctionToolSection(name="world", timeout_s=1)])
        async with box.open(Task(id="t"), seed=0) as tools:
            calls = [ToolCall("act", json.dumps({"number": one})) for one in range(3)]
            late = await tools.call(calls)
            goes_on.set()

            for _ in range(1000):
                (after,) = await tools.call([ToolCall("act", '{"number": 7}')])
                if not after.is_error:
                    break
                await asyncio.sleep(0.01)

        await box.close()
        return late, after

    late, after = run_coroutine(work())
    assert {one.text for one in late} == {"Error: act: no answer within 1 s"}
    assert after.text == "done"
    assert (made[1:], closed.is_set()) == ([7], True)


def test_an_async_close_is_awaited_and_a_failing_one_is_shown(capsys):
    closed = []

    @tool("base")
    class Base:
        def look(self) -> str:
            return "grass"

        async def close(self):
            await asyncio.sleep(0)
            closed.append(1)

    @tool("broken")
    class Broken:
        def see(self) -> str:
            return "grass"

        def close(self):
            raise OSError("the disk is full")

    called(("look", {}))
    assert closed == [1]
    assert "the tool broken: close failed: OSError: the disk is full" in capsys.readouterr().err


def test_an_object_that_is_never_made_fails_the_attempt():
    goes_on = threading.Event()

    @tool("world")
    class World:
        def __init__(self):
            goes_on.wait(300)

        def look(self) -> str:
            return "grass"

    try:
        with pytest.raises(
            ToolUnavailableError, match=r"(?s)World was not made within 0\.05 s .*goes_on.wait"
        ):
            called(timeout_s=0.05)
    finally:
        goes_on.set()


def test_methods_of_every_kind_are_called_with_their_arguments():
    @tool("kinds")
    class Kinds:
        @staticmethod
        def double(number: int) -> int:
            return 2 * number

        def later(self, number: int):
            async def work():
                return number + 1

            return work()

        def wrong(self) -> ToolResult:
            return ToolResult(text="paid", reward=float("nan"))

    results, metrics, _ = called(
        ("double", {"number": 3}), ("later", {"number": 3}), ("wrong", {}), told=[]
    )
    assert [result.text for result in results] == [
        "6",
        "4",
        "Error: wrong failed: ValueError: the reward of a ToolResult is nan",
    ]
    assert metrics["num_tool_failures"] == 1

    with pytest.raises(ConfigError, match="its calls can't be cached"):
        called(cache=True)


def test_the_policy_gets_names_that_every_api_takes():
    @tool("repos/search.code v2")
    def search() -> str:
        return "found"

    assert list(schemas()) == ["repos_search_code_v2"]
    (result,), _, _ = called(("repos_search_code_v2", {}))
    assert result.text == "found"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"include": ("look", "lok*")}, r"no tool is called 'lok\*': did you mean look\?"),
        ({"exclude": ("*",)}, "`exclude` removes every tool of look"),
        ({"narrow": {"lok": {}}}, "narrow: no tool is called 'lok': did you mean look?"),
        (
            {"narrow": {"look": {"wher": {"enum": ["up"]}}}},
            "narrow: no parameter of look is called 'wher': did you mean where?",
        ),
    ],
)
def test_a_choice_of_tools_that_leaves_none_is_told(options, problem):
    @tool("look")
    def look(where: str = "down") -> str:
        return "grass"

    with pytest.raises(ConfigError, match=problem):
        called(**options)


def test_whatever_a_tool_says_is_bounded_and_can_be_read():
    @tool("shout")
    def shout(what: str) -> str:
        if what == "fail":
            raise OSError("x" * 100_000)
        return "half \ud800 of a pair"

    results, _, _ = called(
        ("shout", {"what": "fail"}),
        ("shout", {"what": "y"}),
        ("z" * 100_000, {}),
        told=[],
        max_result_chars=500,
    )
    assert len(results[0].text) < 600 and len(results[2].text) < 11_000
    assert results[1].text == "half ? of a pair"


def test_a_timeout_of_the_tool_itself_is_a_failure_of_the_tool():
    @tool("ask")
    def ask() -> str:
        raise TimeoutError("the database did not answer")

    (result,), metrics, _ = called(("ask", {}), told=[])
    assert result.text == "Error: ask failed: TimeoutError: the database did not answer"
    assert metrics == {"num_tool_failures": 1, "num_tool_errors": 1}


def test_an_outcome_that_never_comes_fails_the_attempt_in_words():
    goes_on = threading.Event()

    @tool("world")
    class World:
        def look(self) -> str:
            return "grass"

        def outcome(self):
            goes_on.wait(300)

    try:
        with pytest.raises(
            EnvironmentFailure, match="'world' gave no outcome of the attempt within"
        ):
            called(timeout_s=1)
    finally:
        goes_on.set()


def test_a_cancelled_task_of_a_tool_costs_its_call_and_one_of_the_attempt_ends_it():
    began = asyncio.Event()

    @tool("wait")
    async def wait(is_own: bool) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(600))
        began.set()
        if is_own:
            inner.cancel()
        await inner

    (result,), metrics, _ = called(("wait", {"is_own": True}))
    assert result.text == "Error: wait failed: what it waited for was cancelled"
    assert metrics == {"num_tool_failures": 1, "num_tool_errors": 1}

    async def work():
        began.clear()
        async with Toolbox([FunctionToolSection(name="wait")]).open(Task(id="t"), 0) as tools:
            calls = [ToolCall("wait", '{"is_own": false}')]
            playing = asyncio.ensure_future(tools.call(calls))
            await asyncio.wait_for(began.wait(), 300)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    run_coroutine(work())


def test_every_toolset_is_closed_whatever_one_raises(monkeypatch):
    closed = []

    @tool("one")
    def one() -> None: ...

    @tool("two")
    def two() -> None: ...

    async def close(self):
        closed.append(self.name)
        raise OSError(self.name)

    monkeypatch.setattr("agentevo.agents.tools.functions.FunctionTools.close", close)
    with pytest.raises(OSError, match="one"):
        called()

    assert sorted(closed) == ["one", "two"]


def test_a_parameter_that_takes_anything_is_narrowed():
    section = FunctionToolSection(name="look", narrow={"look": {"where": {"enum": ["up"]}}})
    spec = ToolSpec(name="look", parameters={"type": "object", "properties": {"where": True}})
    narrowed = _OfferedToolset(section, SimpleNamespace()).narrow(spec)
    assert narrowed.parameters == {"type": "object", "properties": {"where": {"enum": ["up"]}}}
    assert spec.parameters["properties"] == {"where": True}
