"""What a server's tools do, found out by real calls: which of them answer what, which change the
state that others tell of, and which refuse what their own schema allows.

Calls are made in sessions of their own, as attempts have them. A tool is called with arguments of
its schema, then with what others gave; one that answers none of these calls is said to the user
with its last words, and no task needs it. Whether a tool changes something is seen by the others:
all that are known are asked twice, the tool is called, and they are asked again. A tool that
answers SQL is asked for its tables (databases.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentevo.errors import ConfigError
from agentevo.task_making.calls import CallResult, ToolWorld, call_tool
from agentevo.task_making.databases import SurveyedDatabase, find_database
from agentevo.task_making.values import Values, properties
from agentevo.tools.toolbox import AttemptTools

TRIES = 10
"""Calls of a tool until one is answered."""
OPTIONAL = 0.3
"""How often an argument that is not needed is given, where values of it are known."""
MAX_TOOLS = 64


class Survey(msgspec.Struct, kw_only=True):
    """What is known of a server."""

    schemas: dict[str, dict[str, Any]]
    """Tool -> the schema of its arguments."""
    descriptions: dict[str, str]
    specs: list[dict[str, Any]]
    """All tools in OpenAI's form."""
    values: Values
    answered: dict[str, CallResult] = {}
    """Tool -> a call that it answered."""
    changing: set[str] = set()
    """Tools that change what others tell."""
    databases: dict[str, SurveyedDatabase] = {}
    """Tools that answer SQL -> of what."""
    silent: dict[str, str] = {}
    """Tools that answered no call -> what the last one came to."""

    @property
    def usable(self) -> list[str]:
        """Tools that answer."""
        return [name for name in self.schemas if name in self.answered]

    @property
    def names(self) -> list[str]:
        """Names of tools that no text of a task may hold: all but plain words, such as `weather`,
        that the tools' own descriptions and parameters say as words."""
        parameters = [name for schema in self.schemas.values() for name in properties(schema)]
        said = " ".join([*self.descriptions.values(), *parameters])
        words = set(re.findall(r"[a-z]+", said.lower()))
        return [one for one in self.schemas if not (one.isalpha() and one in words)]

    @property
    def asking(self) -> list[str]:
        """Of these, the ones that change nothing."""
        return [name for name in self.usable if name not in self.changing]

    def learn(self, got: CallResult) -> None:
        """Learns what a result, or a refusal, names of any tool's parameters; arguments that were
        taken are values of parameters of their names."""
        for schema in self.schemas.values():
            self.values.learn(schema, got.text)
        if not got.is_error and got.tool not in self.databases:
            for name, value in got.arguments.items():
                if isinstance(value, (str, int)):
                    self.values.add(name, [value])

    def draw_arguments(
        self, name: str, draw: random.Random, fixed: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Arguments of a call: those that are needed, and some of the others. `fixed`: those that
        are decided already."""
        schema = self.schemas[name]
        needed = schema.get("required") or ()
        arguments = dict(fixed or {})
        for parameter, one in properties(schema).items():
            is_known = bool(self.values.known(parameter, one))
            if parameter not in arguments and (
                parameter in needed or (is_known and draw.random() < OPTIONAL)
            ):
                arguments[parameter] = self.values.draw(parameter, one, draw)

        return arguments


async def survey(
    world: ToolWorld, given: Mapping[str, Sequence[Any]] | None = None, *, seed: int
) -> Survey:
    """Finds it out. `given`: values that somebody names, by parameter. Raises
    ToolUnavailableError where the server can't be reached, ConfigError where it has no tools, or
    answers no call of any."""
    draw = random.Random(f"survey-{seed}")
    async with world.open(0) as tools:
        specs = [one["function"] for one in tools.schemas]
        if len(specs) > MAX_TOOLS:
            raise ConfigError(
                f"the server has {len(specs)} tools, and tasks are made of {MAX_TOOLS} at most: "
                "choose some by --include"
            )

        known = Survey(
            schemas={spec["name"]: spec["parameters"] for spec in specs},
            descriptions={spec["name"]: spec["description"] for spec in specs},
            specs=list(tools.schemas),
            values=Values(given),
        )
        for name, schema in known.schemas.items():
            if found := await find_database(tools, name, schema):
                known.databases[name], known.answered[name] = found

        for _ in range(TRIES):
            for name in known.schemas:
                if name not in known.answered:
                    await _try_tool(tools, known, name, draw)

    if not known.answered:
        lines = "\n".join(f"{name}: {why}" for name, why in known.silent.items())
        raise ConfigError(
            "no tool of the server answers calls that its schema allows, so no task can be made: "
            f"correct its schemas, or give values by --value\n{lines}"
        )

    for name in known.usable:
        if await _changes(world, known, name):
            known.changing.add(name)

    return known


async def _try_tool(tools: AttemptTools, known: Survey, name: str, draw: random.Random) -> None:
    arguments = known.draw_arguments(name, draw)
    got = await call_tool(tools, name, arguments)
    known.learn(got)

    if got.is_error:
        known.silent[name] = f"{_told(arguments)} -> {' '.join(got.text.split())[:200]}"
        return

    known.answered[name] = got
    known.silent.pop(name, None)


async def _changes(world: ToolWorld, known: Survey, name: str) -> bool:
    """Whether a call of the tool changes what itself or another one says."""
    call = known.answered[name]
    others = [one for tool, one in known.answered.items() if tool != name]
    async with world.open(0) as tools:
        for _ in range(2):  # what these change themselves has happened after that
            before = [await call_tool(tools, one.tool, one.arguments) for one in others]
        first = await call_tool(tools, name, call.arguments)
        after = [await call_tool(tools, one.tool, one.arguments) for one in others]
        again = await call_tool(tools, name, call.arguments)

    return first.text != again.text or [one.text for one in before] != [one.text for one in after]


def _told(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())[:200]
