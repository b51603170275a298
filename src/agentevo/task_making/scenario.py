"""A scenario: the calls that solve it, the arguments that the agent gets, and the check of the
solution. Only its content decides whether it is held out, not the persona or the wording.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from agentevo.task_making.questions import DatabaseQuestion
from agentevo.tools.state_checks import SOLVED_BY_CALLS, STATE_CHECKS, StateCheck

HELD_OUT = 0.2
"""Share of all contents that is held out."""
HARDEST = 5
"""Key of a made task's metadata: the calls that solve it."""
CONTENT = "content"
"""Key of a made task's metadata: the name of its content."""
PARENT = "variant_of"
"""Key of a made task's metadata: the id of the task that it is a harder variant of."""


class ValueSource(msgspec.Struct, frozen=True, kw_only=True):
    """An argument that the agent is not given: it is the first such value in the result of an
    earlier call."""

    step: int
    """The number of that call, from 0."""
    name: str
    """Of the parameter that it is for."""


class ScenarioStep(msgspec.Struct, frozen=True, kw_only=True):
    """One of the calls that solve a scenario."""

    tool: str
    arguments: dict[str, Any]
    """With the values that were found."""
    found: dict[str, ValueSource] = {}
    """Parameter -> where its value is from."""
    result: str = ""
    changes: bool = False
    """The call changes the state of the server."""
    question: DatabaseQuestion | None = None
    """The question that the call asks a database: the agent is given its words, and has to write
    the SQL."""

    @property
    def told_values(self) -> dict[str, Any]:
        """The arguments that the agent is given; of a question the values that it names."""
        if self.question is not None:
            return self.question.told_values
        return {
            name: argument for name, argument in self.arguments.items() if name not in self.found
        }


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    steps: list[ScenarioStep]
    world: int
    answer: str | None = None
    """The right answer, if the state does not decide."""
    place: str = ""
    """The part of the last result that is the answer: a key of its JSON, or empty for its first
    line."""
    checks: list[StateCheck] = []
    is_open: bool = False
    """Neither: its calls have different results each time, so a judge must score the attempt."""
    parent: str = ""
    """The id of the task that it is a harder variant of."""

    @property
    def kind(self) -> Literal["state", "answer", "open"]:
        """What decides."""
        if self.is_open:
            return "open"
        return "state" if any(step.changes for step in self.steps) else "answer"

    @property
    def content(self) -> str:
        """A name for the given arguments and the actions of the task, independent of world and
        wording."""
        calls = [
            [
                step.tool,
                step.told_values,
                {name: [source.step, source.name] for name, source in step.found.items()},
                *([step.question.sql] if step.question is not None else []),
            ]
            for step in self.steps
        ]
        text = json.dumps([calls, self.kind, self.place], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def difficulty(self) -> int:
        """From 1 to HARDEST: a point for each call, for each value to find and for each further
        clause of a question, less the first."""
        clauses = sum(step.question.clauses for step in self.steps if step.question is not None)
        return min(HARDEST, len(self.steps) + sum(len(step.found) for step in self.steps) + clauses)

    @property
    def tools(self) -> list[str]:
        """In order, each once."""
        return list(dict.fromkeys(step.tool for step in self.steps))

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Pairs of tools that are called one after the other."""
        return pairs_of([step.tool for step in self.steps])

    def row(self, query: str, *, language: str, persona: str, worlds: int) -> dict[str, Any]:
        """As a line of a file of tasks."""
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
            CONTENT: self.content,
            SOLVED_BY_CALLS: msgspec.to_builtins(self.steps),
        }


def pairs_of(tools: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of each tool with the next one."""
    return set(pairwise(tools))


def is_held_out(content: str, share: float = HELD_OUT) -> bool:
    """Whether this content is only for evaluation."""
    return hashlib.sha256(f"held out {content}".encode()).digest()[0] < 256 * share


def steps_of(row: Mapping[str, Any]) -> list[ScenarioStep]:
    """The calls that solve a made task. Raises msgspec.ValidationError."""
    return msgspec.convert(row.get(SOLVED_BY_CALLS, []), list[ScenarioStep])
