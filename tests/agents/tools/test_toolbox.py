"""Tools of an attempt: schemas, arguments, and what becomes of calls that go wrong."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Literal

import pytest
from called_tools import called, schemas
from hypothesis import given
from hypothesis import strategies as st

from agentevo.agents.tools.tool import ToolResult, shorten_text
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.tools import PACKAGED, FunctionToolSection, tool
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall


@dataclass
class Place:
    row: int
    column: int = 0


def test_a_schema_is_made_of_type_hints_and_docstring():
    @tool("move")
    def move(
        to: Place, how: Literal["walk", "fly"] = "walk", notes: list[str] | None = None
    ) -> str:
        """Moves the piece.

        It has to be there.

        Args:
            to: Where it ends.
            how: By which means.
        """
        return ""

    function = schemas()["move"]
    assert function["description"] == "Moves the piece.\n\nIt has to be there."

    parameters = function["parameters"]
    assert parameters["required"] == ["to"]
    assert parameters["properties"]["to"]["description"] == "Where it ends."
    assert parameters["properties"]["how"] == {
        "default": "walk",
        "description": "By which means.",
        "enum": ["walk", "fly"],
        "type": "string",
    }
    assert parameters["$defs"]["Place"]["required"] == ["row"]


def test_arguments_have_the_types_that_the_function_asks_for():
    seen = []

    @tool("move")
    def move(to: Place, self_: int = 2, model_config: str = "x") -> None:
        seen.append((to, self_, model_config))

    (result,), metrics, _ = called(("move", {"to": {"row": 3}, "model_config": "y"}))
    assert (result, seen) == (ToolResult(text=""), [(Place(3), 2, "y")])
    assert metrics == {"num_tool_calls": 1}


@pytest.mark.parametrize(
    ("arguments", "problem", "metric"),
    [
        ({}, "wrong arguments for add: a is missing", "num_wrong_arguments"),
        ({"a": "x"}, "a: input should be a valid integer", "num_wrong_arguments"),
        ({"a": 1, "c": 2}, "there is no c (arguments: a, b)", "num_wrong_arguments"),
        ("[1]", "the arguments of add are no JSON object", "num_wrong_arguments"),
        ('{"a": 1', "the arguments of add are no JSON (", "num_wrong_arguments"),
        ("[" * 100_000, "the arguments of add are no JSON (", "num_wrong_arguments"),
    ],
)
def test_wrong_arguments_are_a_result_that_the_policy_reads(arguments, problem, metric):
    @tool("add")
    def add(a: int, b: int = 0) -> int:
        return a + b

    (wrong, right), metrics, _ = called(("add", arguments), ("add", {"a": 2, "b": 3}))
    assert wrong.is_error and wrong.text.startswith("Error: ") and problem in wrong.text
    assert right == ToolResult(text="5")
    assert metrics == {metric: 1, "num_tool_errors": 1, "num_tool_calls": 1}


def test_an_unknown_tool_gets_the_known_names():
    @tool("search")
    def search(query: str) -> str:
        return query

    (result,), metrics, _ = called(("serach", {"query": "x"}))
    assert result.text == "Error: there is no tool 'serach': did you mean search? tools: search"
    assert metrics["num_unknown_tools"] == 1


def test_a_tool_that_breaks_costs_its_call_and_is_shown_once():
    @tool("broken")
    def broken(x: int) -> int:
        return x // 0

    @tool("exits")
    def exits() -> None:
        raise SystemExit(3)

    told = []
    results, metrics, _ = called(
        ("broken", {"x": 1}), ("broken", {"x": 2}), ("exits", {}), told=told
    )
    assert [result.is_error for result in results] == [True] * 3
    assert results[0].text == (
        "Error: broken failed: ZeroDivisionError: integer division or modulo by zero"
    )
    assert "a tool can't end the process" in results[2].text
    assert metrics["num_tool_failures"] == 3
    assert len(told) == 2
    (shown,) = (line for line in told if "the tool broken" in line)  # all are called at once
    assert "return x // 0" in shown and "agentevo/tools" not in shown


def test_a_tool_may_refuse_and_pay():
    @tool("buy")
    async def buy(what: str):
        if what == "moon":
            raise ToolError("the moon is not for sale")
        return ToolResult(text="bought", reward=0.5)

    (refused, bought), metrics, _ = called(("buy", {"what": "moon"}), ("buy", {"what": "tea"}))
    assert refused == ToolResult(text="Error: the moon is not for sale", is_error=True)
    assert bought == ToolResult(text="bought", reward=0.5)
    assert metrics == {"num_tool_calls": 2, "num_tool_errors": 1}


def test_each_attempt_has_an_object_of_its_own():
    closed = []

    @tool("account")
    class Account:
        def __init__(self, task, seed: int, fee: float = 0.0):
            self.balance = task.metadata["start"]
            self.fee = fee
            self.seed = seed
            self.thread = threading.current_thread()

        def pay(self, amount: float) -> dict[str, float]:
            """Pays.

            Args:
                amount: How much.
            """
            assert threading.current_thread() is self.thread
            self.balance -= amount + self.fee
            return {"balance": self.balance}

        def outcome(self):
            return {"left": self.balance}

        def close(self):
            closed.append(self.seed)

        def _hidden(self): ...

    sections = [FunctionToolSection(name="account", options={"fee": 1.0})]
    for _ in range(2):
        results, _, outcomes = called(("pay", {"amount": 2}), ("_hidden", {}), sections=sections)
        assert results[0].text == '{"balance": 1.0}'
        assert results[1].text.startswith("Error: there is no tool '_hidden'")
        assert outcomes == {"account": {"left": 1.0}}

    assert closed == [3, 3]  # the end of a process waits for them


@pytest.mark.slow
def test_a_call_that_hangs_costs_itself_alone():
    goes_on = threading.Event()

    @tool("world")
    class World:
        def wait(self) -> None:
            goes_on.wait(300)

        def look(self) -> str:
            return "grass"

    @tool("add")
    def add(a: int) -> int:
        return a + 1

    async def work():
        limits = {"world": 1, "add": 300}
        entries = [
            FunctionToolSection(name=name, timeout_s=limit) for name, limit in limits.items()
        ]
        async with Toolbox(entries).open(Task(id="t"), seed=0) as tools:
            first = await tools.call([ToolCall("wait", ""), ToolCall("add", '{"a": 1}')])
            second = await tools.call([ToolCall("look", "")])
        return [*first, *second], tools.metrics

    results, metrics = run_coroutine(work())
    goes_on.set()
    assert [result.text for result in results] == [
        "Error: wait: no answer within 1 s",
        "2",
        "Error: look can't be reached: an earlier call of these tools has not returned",
    ]
    assert (metrics["num_tool_timeouts"], metrics["num_tool_failures"]) == (1, 1)


@pytest.mark.parametrize(
    ("was_sent", "cache", "tries"), [(False, False, 3), (True, False, 1), (True, True, 3)]
)
def test_only_a_call_that_can_do_no_harm_is_made_again(was_sent, cache, tries):
    made = []

    @tool("far")
    async def far() -> None:
        made.append(1)
        raise ToolUnavailableError("nobody there", was_sent=was_sent)

    (result,), _, _ = called(("far", {}), cache=cache, retries=2)
    assert result.text == "Error: far can't be reached: nobody there"
    assert len(made) == tries


def test_equal_calls_are_made_once_if_the_tool_says_so():
    made = []

    @tool("search", cache=True)
    async def search(query: str, top: int = 3) -> str:
        made.append((query, top))
        await asyncio.sleep(0.01)
        if query == "bad":
            raise ToolError("no")
        return query.upper()

    asked = [("search", {"query": "a", "top": 3}), ("search", {"top": 3, "query": "a"})]
    results, _, _ = called(*asked, ("search", {"query": "b"}), *[("search", {"query": "bad"})] * 2)
    assert [result.text for result in results[:3]] == ["A", "A", "B"]
    assert sorted(made) == [("a", 3), ("b", 3), ("bad", 3), ("bad", 3)]

    made.clear()
    called(*asked, cache=False)
    assert len(made) == 2


def test_calls_of_one_entry_are_limited():
    at_once = [0, 0]

    @tool("slow")
    async def slow() -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.005)
        at_once[0] -= 1

    called(*[("slow", {})] * 9, max_concurrent=2)
    assert at_once[1] == 2


def test_names_of_several_toolsets_never_collide():
    @tool("cats")
    class Cats:
        def look(self) -> str:
            return "a cat"

        def feed(self) -> str:
            return "fed"

    @tool("dogs")
    class Dogs:
        def look(self) -> str:
            return "a dog"

    assert sorted(schemas()) == ["cats__look", "dogs__look", "feed"]

    results, _, _ = called(("cats__look", {}), ("dogs__look", {}), ("look", {}))
    assert [result.text for result in results[:2]] == ["a cat", "a dog"]
    assert results[2].is_error

    only = [
        FunctionToolSection(name="cats", exclude=("fee*",)),
        FunctionToolSection(name="dogs", exclude=("*",)),
    ]
    results, _, _ = called(("look", {}), ("feed", {}), sections=only)
    assert [result.is_error for result in results] == [False, True]


@given(st.text(max_size=400), st.integers(100, 300))
def test_a_long_result_keeps_its_head_and_tail(text, longest):
    short = shorten_text(text, longest)
    if len(text) <= longest:
        assert short == text
        return

    head = short.rpartition("]\n")[0]
    note = short
    tail = short.rpartition("]\n")[2]
    assert text.startswith(head.rpartition("\n[")[0]) and text.endswith(tail)
    assert f"[{len(text) - longest:,} characters are left out here]" in note
    assert len(head.rpartition("\n[")[0]) + len(tail) == longest


def test_a_flood_is_shortened():
    @tool("flood")
    def flood() -> str:
        return "x" * 50_000_000

    (result,), _, _ = called(("flood", {}), max_result_chars=1000)
    assert len(result.text) < 1100 and "49,999,000 characters are left out" in result.text


class Opaque:
    pass


def no_type(x: Opaque) -> None: ...
def stars(*args: int) -> None: ...
def unnamed(x: int, /) -> None: ...
def keywords(**more: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_type, "Unable to generate pydantic-core schema"),
        (stars, "arguments are passed by name"),
        (unnamed, "arguments are passed by name"),
        (keywords, "name each parameter"),
    ],
)
def test_a_function_that_can_not_be_called_by_name_is_refused(function, problem):
    tool("odd")(function)
    with pytest.raises(ConfigError, match=f"the tool 'odd'.*{problem}"):
        called()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speed": 1}, "takes no option 'speed' \\(options: size\\)"),
        ({}, "World needs 'size': give it under `options`"),
    ],
)
def test_options_of_a_class_are_checked(options, problem):
    @tool("world")
    class World:
        def __init__(self, task, size: int): ...

        def look(self) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        Toolbox([FunctionToolSection(name="world", options=options)])


class Door:
    def __init__(self, task, fee: float = 0.0, ways: dict[str, list[int]] | None = None, **more):
        self.given = (fee, ways, more)

    def say(self) -> str:
        return repr(self.given)


def test_options_are_converted_by_the_hints_of_the_constructor():
    tool("door")(Door)
    options = {"fee": "2", "ways": {"a": ["1", 2]}, "other": "3"}
    (result,), _, _ = called(("say", {}), options=options)
    assert result.text == "(2.0, {'a': [1, 2]}, {'other': '3'})"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fee": "much"}, "the option fee: got 'much'; needs a number"),
        ({"fee": None}, "the option fee: got null; needs a number"),
        ({"ways": 5}, "the option ways: got 5; needs a mapping, or null"),
        (
            {"ways": {"a": [1, "x"]}},
            r"the option ways\.a\[1\]: got 'x'; needs a whole number",
        ),
    ],
)
def test_options_that_the_constructors_hints_do_not_take_are_refused(options, problem):
    tool("door")(Door)
    with pytest.raises(ConfigError, match=f"^the tool 'door': Door: {problem}"):
        Toolbox([FunctionToolSection(name="door", options=options)])


def test_hints_that_say_nothing_to_pydantic_leave_an_option_as_it_is():
    @tool("own")
    class Own:
        def __init__(self, later: Nowhere = 1, size: int = 1): ...  # noqa: F821

        def say(self) -> None: ...

    Toolbox([FunctionToolSection(name="own", options={"later": 2})])
    with pytest.raises(ConfigError, match="the option size: got 'big'"):
        Toolbox([FunctionToolSection(name="own", options={"later": 2, "size": "big"})])


def test_the_tools_that_ship_are_known_by_name():
    with_options = ("search", "fetch", "web_search")
    made = Toolbox(
        [FunctionToolSection(name=name) for name in PACKAGED if name not in with_options]
    )
    assert made is not None
    (result,), _, _ = called(
        ("calculator", {"expression": "6 * 7"}), sections=[FunctionToolSection(name="calculator")]
    )
    assert result.text == "42"

    with pytest.raises(ConfigError, match=r"did you mean 'calculator'\?.*import=\[./my_file.py\]"):
        Toolbox([FunctionToolSection(name="calculater")])


def test_a_tool_of_ones_own_goes_before_one_that_ships():
    @tool("files")
    def files(word: str) -> str:
        return word.upper()

    (result,), _, _ = called(("files", {"word": "a"}))
    assert result.text == "A"


def test_what_can_be_no_tool_is_refused():
    with pytest.raises(ConfigError, match="no public method"):
        tool("empty")(type("Empty", (), {}))
    with pytest.raises(ConfigError, match="give a function or a class"):
        tool("number")(3)
    tool("once")(lambda: None)
    with pytest.raises(ConfigError, match="'once' is listed twice"):
        Toolbox([FunctionToolSection(name="once")] * 2)
