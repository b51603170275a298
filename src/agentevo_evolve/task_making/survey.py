"""A survey of a server's tools with real calls. It finds the tools that return results, the tools
that change the state that others show, and the tools that refuse arguments that their own schema
allows.

Like attempts, calls run in sessions of their own. A tool is called with arguments from its schema,
then with values from other results. A tool that returns no result for any of these calls is
reported to the user with its last message, and no task needs it. Other tools show whether a tool
changes the state. All known tools are called twice, then the tool, and then all known tools again.
A tool that accepts SQL is queried for its tables (databases.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentevo.agents.tools.toolbox import AttemptTools
from agentevo.errors import ConfigError
from agentevo_evolve.task_making.calls import CallResult, ToolWorld, call_all, call_tool
from agentevo_evolve.task_making.databases import SurveyedDatabase, find_database
from agentevo_evolve.task_making.values import Values, properties

MAX_TRIES = 10
"""The maximum number of calls of a tool until it returns a result."""
OPTIONAL_PROBABILITY = 0.3
"""The probability of an optional argument, if values for it are known."""
MAX_TOOLS = 64


class Survey(msgspec.Struct, kw_only=True):
    """The known facts about a server."""

    schemas: dict[str, dict[str, Any]]
    """Maps a tool to the schema of its arguments."""
    descriptions: dict[str, str]
    specs: list[dict[str, Any]]
    """All tools in OpenAI's form."""
    values: Values
    answered: dict[str, CallResult] = {}
    """Maps a tool to a call that returned a result."""
    changing: set[str] = set()
    """Tools that change the results of others."""
    databases: dict[str, SurveyedDatabase] = {}
    """Maps a tool that accepts SQL to its database."""
    unresponsive: dict[str, str] = {}
    """Maps a tool that returned no result to the message of its last call."""

    @property
    def usable(self) -> list[str]:
        """The tools that return results."""
        return [name for name in self.schemas if name in self.answered]

    @property
    def names(self) -> list[str]:
        """The names of tools that a task's text may not contain. Names that are plain words, such
        as `weather`, are allowed if the tools' descriptions and parameters use them as words."""
        parameters = [name for schema in self.schemas.values() for name in properties(schema)]
        all_words = " ".join([*self.descriptions.values(), *parameters])
        words = set(re.findall(r"[a-z]+", all_words.lower()))
        return [
            tool_name
            for tool_name in self.schemas
            if not (tool_name.isalpha() and tool_name in words)
        ]

    @property
    def read_only_tools(self) -> list[str]:
        """The usable tools that change nothing."""
        return [name for name in self.usable if name not in self.changing]

    def learn(self, got: CallResult) -> None:
        """Learns values of tools' parameters from a result or a refusal. Accepted arguments also
        become values of the parameters with their names."""
        for schema in self.schemas.values():
            self.values.learn(schema, got.text)
        if not got.is_error and got.tool not in self.databases:
            for name, value in got.arguments.items():
                if isinstance(value, (str, int)):
                    self.values.add(name, [value])

    def draw_arguments(
        self, name: str, draw: random.Random, fixed: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Random arguments of a call: the required ones, and some of the others. `fixed`: arguments
        whose values are already decided."""
        schema = self.schemas[name]
        needed = schema.get("required") or ()
        arguments = dict(fixed or {})
        for parameter, parameter_schema in properties(schema).items():
            is_known = bool(self.values.known_values(parameter, parameter_schema))
            if parameter not in arguments and (
                parameter in needed or (is_known and draw.random() < OPTIONAL_PROBABILITY)
            ):
                arguments[parameter] = self.values.draw(parameter, parameter_schema, draw)

        return arguments


async def survey(
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
        for name, schema in surveyed.schemas.items():
            if database_and_call := await find_database(tools, name, schema):
                surveyed.databases[name], surveyed.answered[name] = database_and_call

        for _ in range(MAX_TRIES):
            for name in surveyed.schemas:
                if name not in surveyed.answered:
                    await _try_tool(tools, surveyed, name, draw)

    if not surveyed.answered:
        lines = "\n".join(f"{name}: {why}" for name, why in surveyed.unresponsive.items())
        raise ConfigError(
            "no tool of the server answers calls that its schema allows, so no task can be made: "
            f"correct its schemas, or give values by --value\n{lines}"
        )

    for name in surveyed.usable:
        if await _changes(world, surveyed, name):
            surveyed.changing.add(name)

    return surveyed


async def _try_tool(tools: AttemptTools, surveyed: Survey, name: str, draw: random.Random) -> None:
    arguments = surveyed.draw_arguments(name, draw)
    result = await call_tool(tools, name, arguments)
    surveyed.learn(result)

    if result.is_error:
        surveyed.unresponsive[name] = (
            f"{_format_arguments(arguments)} -> {' '.join(result.text.split())[:200]}"
        )
        return

    surveyed.answered[name] = result
    surveyed.unresponsive.pop(name, None)


async def _changes(world: ToolWorld, surveyed: Survey, name: str) -> bool:
    """Whether a call of the tool changes the result of any other tool."""
    call = surveyed.answered[name]
    other_calls = [(other, answer.arguments) for other, answer in surveyed.answered.items()]
    other_calls = [(other, arguments) for other, arguments in other_calls if other != name]
    async with world.open(0) as tools:
        for _ in range(2):  # the first round makes the changes that these calls cause themselves
            before = await call_all(tools, other_calls)
        first = await call_tool(tools, name, call.arguments)
        after = await call_all(tools, other_calls)
        repeated = await call_tool(tools, name, call.arguments)

    is_same = [result.text for result in before] == [result.text for result in after]
    return first.text != repeated.text or not is_same


def _format_arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())[:200]
