"""Calls with arguments made from schemas, and how each ends."""

from __future__ import annotations

import time

import pytest

from agentevo.agents.tools.trial import made_value, try_calls
from agentevo.config.tools import FunctionToolSection, tool
from agentevo.errors import ToolError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, 2.5),
        ({"type": "string", "minLength": 6}, "testtt"),
        ({"type": "string", "maxLength": 2}, "te"),
        ({"type": "string", "format": "uri"}, "http://example.com/"),
        ({"enum": ["left", "right"]}, "left"),
        ({"type": "integer", "default": 7}, 7),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"type": ["integer", "null"]}, 1),
        ({"$ref": "#/$defs/place"}, {"row": 1}),
        ({"$ref": "#/$defs/none"}, "test"),
        ({"$ref": "#/$defs/ring"}, "test"),
        ({"type": "object", "properties": 3, "required": ["a"]}, {}),
        ({"type": "integer", "minimum": "low", "maximum": float("inf")}, 1),
        (True, "test"),
        ([], "test"),
    ],
)
def test_a_value_is_what_its_schema_allows(schema, value):
    integer = {"type": "integer"}
    place = {"type": "object", "properties": {"row": integer, "x": {}}, "required": ["row"]}
    ring = {"$ref": "#/$defs/ring"}
    assert made_value(schema, {"$defs": {"place": place, "ring": ring}}) == value


def test_a_schema_without_an_end_is_cut():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    made = made_value(node, node)
    depth = 0
    while made:
        made = made["next"]
        depth += 1
    assert 1 < depth < 10


def test_each_tool_is_called_once_and_says_how_it_ended():
    @tool("kit")
    class Kit:
        """Tools of every kind."""

        def __init__(self, task):
            self.answer = task.answer

        def look(self, number: int) -> str:
            """Looks."""
            return f"{self.answer} {number}"

        def refuse(self) -> str:
            """Refuses."""
            raise ToolError("not today")

        def fail(self) -> str:
            """Fails."""
            raise RuntimeError("broken")

        def sleep(self) -> str:
            """Takes its time."""
            time.sleep(1.5)
            return ""

    async def work(calls=()):
        sections = [FunctionToolSection(name="kit", timeout_s=0.5)]
        return [
            tried_call async for tried_call in try_calls(sections, Task(id="t", answer=5), calls)
        ]

    found = {one.name: one for one in run_coroutine(work())}
    assert {name: one.status for name, one in found.items()} == {
        "fail": "broken",
        "look": "answered",
        "refuse": "error",
        "sleep": "broken",
    }
    assert (found["look"].text, found["look"].arguments) == ("5 1", '{"number": 1}')
    assert found["sleep"].seconds >= 0.4

    (wrong,) = run_coroutine(work([ToolCall("look", '{"number": "one"}')]))
    assert wrong.status == "refused" and "number" in wrong.text
