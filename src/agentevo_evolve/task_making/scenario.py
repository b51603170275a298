"""A scenario: the calls that solve it, the arguments that the agent receives, and the check of the
solution. Only its content decides whether it is held out, not the persona or the wording.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS, STATE_CHECKS, StateCheck
from agentevo_evolve.task_making.questions import DatabaseQuestion

HELD_OUT_SHARE = 0.2
"""The share of all contents that is held out."""
MAX_DIFFICULTY = 5
ANY_PART = "any part"
"""The place of an answer that is neither the first value of a key nor the first line."""
CONTENT = "content"
"""The key in a task's metadata with the name of its content."""
PARENT = "variant_of"
"""The key in a task's metadata with the id of the task that this task is a harder variant of."""
WRITTEN = "written"
"""The key in a task's metadata that says that a model wrote the scenario."""


class ValueSource(msgspec.Struct, frozen=True, kw_only=True):
    """The source of an argument that the agent does not receive: the first value of that name in
    the result of an earlier call, or, without a name, any part of the result."""

    step: int
    """The number of the earlier call, from 0."""
    name: str
    """The name of the parameter that the value is for. Empty for any part of the result."""


class ScenarioStep(msgspec.Struct, frozen=True, kw_only=True):
    """One of the calls that solve a scenario."""

    tool: str
    arguments: dict[str, Any]
    """The arguments, including the values from earlier results."""
    found: dict[str, ValueSource] = {}
    """Maps a parameter to the source of its value."""
    result: str = ""
    changes: bool = False
    """Whether the call changes the state of the server."""
    question: DatabaseQuestion | None = None
    """The question that the call asks a database. The agent receives its words and must write the
    SQL."""

    @property
    def required_values(self) -> dict[str, Any]:
        """The arguments that the agent receives. For a question, the values in its words."""
        if self.question is not None:
            return self.question.required_values
        return {
            name: argument for name, argument in self.arguments.items() if name not in self.found
        }


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that solve a task, and the check of the solution."""

    steps: list[ScenarioStep]
    world: int
    answer: str | None = None
    """The right answer if the attempt is judged by its answer."""
    place: str = ""
    """The part of the last result that is the answer: a key of its JSON, empty for its first line,
    or ANY_PART."""
    checks: list[StateCheck] = []
    num_changed: int = 0
    """The number of the first checks whose results the calls change."""
    is_open: bool = False
    """Whether a judge must score the attempt, because the calls have different results each
    time."""
    parent: str = ""
    """The id of the task that this scenario is a harder variant of."""
    written_difficulty: int = 0
    """The difficulty that the writer states. 0 if no model wrote the scenario."""

    @property
    def kind(self) -> Literal["state", "answer", "open"]:
        """How an attempt is judged: by the final state, by its answer, or by a judge (open)."""
        if self.is_open:
            return "open"
        return "state" if any(step.changes for step in self.steps) else "answer"

    @property
    def content(self) -> str:
        """A name for the task's given arguments and actions, independent of world, wording and the
        order of the calls."""
        calls: list[str] = []
        for step in self.steps:
            sources = {
                name: [calls[source.step], source.name or [step.arguments[name]]]
                for name, source in step.found.items()
            }
            sql = [step.question.sql] if step.question is not None else []
            call = [step.tool, step.required_values, sources, *sql]
            calls.append(json.dumps(call, sort_keys=True))

        text = json.dumps([sorted(calls), self.kind, self.place])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def end_state(self) -> str:
        """A name for what the calls change, by the results that show it. Empty without a state."""
        changed = msgspec.to_builtins(self.checks[: self.num_changed])
        shown_state = sorted(json.dumps(check, sort_keys=True) for check in changed)
        return json.dumps([self.world, shown_state]) if changed else ""

    @property
    def meaning(self) -> str:
        """A name for the outcome and the given arguments, whichever calls lead to the outcome."""
        values = [value for step in self.steps for value in step.required_values.values()]
        outcome = [self.world, self.answer] if self.answer is not None else self.content
        given = sorted(json.dumps(value, sort_keys=True) for value in values)
        return json.dumps([self.end_state or outcome, given])

    @property
    def difficulty(self) -> int:
        """From 1 to MAX_DIFFICULTY, as the writer states it, or: a point for each call, for each
        value to find and for each further clause of a question, minus 1."""
        if self.written_difficulty:
            return self.written_difficulty
        clauses = sum(step.question.clauses for step in self.steps if step.question is not None)
        return min(
            MAX_DIFFICULTY, len(self.steps) + sum(len(step.found) for step in self.steps) + clauses
        )

    @property
    def tools(self) -> list[str]:
        """The tools in order, without repetition."""
        return list(dict.fromkeys(step.tool for step in self.steps))

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Pairs of tools that are called one after the other."""
        return pairs_of([step.tool for step in self.steps])

    def row(self, query: str, *, language: str, persona: str, worlds: int) -> dict[str, Any]:
        """The scenario as a line of a task file."""
        judged: dict[str, Any] = (
            {STATE_CHECKS: msgspec.to_builtins(self.checks), "scorer": "returned"}
            if self.checks
            else {}
            if self.is_open
            else {"answer": self.answer, "scorer": "contains"}
        )
        variant = {PARENT: self.parent} if self.parent else {}
        return {
            "id": f"made-{self.content}-{self.world}",
            "query": query,
            **judged,
            "difficulty": self.difficulty,
            "tools": self.tools,
            "language": language,
            **({"persona": persona} if persona else {}),
            **({"world": self.world} if worlds > 1 else {}),
            **variant,
            **({WRITTEN: True} if self.written_difficulty else {}),
            CONTENT: self.content,
            SOLVED_BY_CALLS: msgspec.to_builtins(self.steps),
        }


def pairs_of(tools: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of each tool and the next tool."""
    return set(pairwise(tools))


def is_held_out(content: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether this content is only for evaluation."""
    return hashlib.sha256(f"held out {content}".encode()).digest()[0] < 256 * share


def steps_of(row: Mapping[str, Any]) -> list[ScenarioStep]:
    """The calls that solve the task of a row. Empty if the row has no such calls. Raises
    msgspec.ValidationError if they are malformed."""
    return msgspec.convert(row.get(SOLVED_BY_CALLS, []), list[ScenarioStep])
