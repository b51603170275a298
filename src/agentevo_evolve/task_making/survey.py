"""The known facts about a server, for the walks. exploration.py finds them by real calls, and walks
add values and results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from agentevo_evolve.task_making.calls import CallResult
from agentevo_evolve.task_making.databases import SurveyedDatabase
from agentevo_evolve.task_making.values import Values, all_parameters, is_path, properties

OPTIONAL_PROBABILITY = 0.3
"""The probability of an optional argument, if values for it are known."""
MAX_CALL_S = 5.0
"""The longest call of a tool that tasks may need."""
MAX_RESULTS = 40
"""The maximum number of different calls of a tool whose results are kept."""


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
    results: dict[str, dict[str, CallResult]] = {}
    """Maps a tool to its results, by their arguments as JSON."""
    readers: set[str] = set()
    """Tools that are known to change nothing, and that return equal results to equal calls."""
    changing: set[str] = set()
    """Tools that change the results of readers."""
    unstable: set[str] = set()
    """Tools that change no reader's result, and return different results to equal calls."""
    left_out: dict[str, str] = {}
    """Maps a tool that returns results and that no task may need to the reason."""
    is_shared: bool = False
    """Whether a session sees what another session changed."""
    databases: dict[str, SurveyedDatabase] = {}
    """Maps a tool that accepts SQL to its database."""
    unresponsive: dict[str, str] = {}
    """Maps a tool that returned no result to the message of its last call."""

    @property
    def usable(self) -> list[str]:
        """The tools that tasks may need."""
        return [
            name for name in self.schemas if name in self.answered and name not in self.left_out
        ]

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
        """The usable tools that are known to change nothing."""
        return [name for name in self.usable if name in self.readers]

    def learn(self, got: CallResult) -> None:
        """Learns values of tools' parameters from a result or a refusal. Accepted texts also become
        values of the parameters with their names; numbers don't, so that they stay different."""
        for schema in self.schemas.values():
            self.values.learn(schema, got.text)
        if got.is_error or got.tool in self.databases:
            return

        results = self.results.setdefault(got.tool, {})
        if len(results) < MAX_RESULTS:
            results[json.dumps(got.arguments, sort_keys=True)] = got

        parameters = dict(all_parameters(self.schemas[got.tool]))
        for name, value in got.arguments.items():
            if isinstance(value, str) and name in parameters:
                self.values.add(name, [value])
            if is_path(name) and isinstance(value, str):
                self.values.learn_listed_files(value, got.text)

    def leave_out_if_slow(self, got: CallResult) -> None:
        """Leaves the tool out if the call took longer than MAX_CALL_S. For calls that run alone:
        concurrent ones are slow on a busy machine."""
        if got.wall_s > MAX_CALL_S:
            self.left_out.setdefault(got.tool, f"a call takes more than {MAX_CALL_S:g} s")

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
                arguments[parameter] = self.values.draw(parameter, parameter_schema, draw, schema)

        return arguments
