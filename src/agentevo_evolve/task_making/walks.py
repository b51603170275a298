"""Random call sequences, which run on the server while they are chosen. Tools, and pairs of
consecutive tools, have a higher probability the less they were used. The agent receives the
arguments of a call, or finds them in results of earlier calls of the walk.

A call whose result no later call uses is left out of the walk, unless the task asks for that
result.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from agentevo.agents.tools.toolbox import AttemptTools
from agentevo_evolve.task_making.calls import CallResult, call_tool
from agentevo_evolve.task_making.questions import DatabaseQuestion
from agentevo_evolve.task_making.scenario import ScenarioStep, ValueSource, pairs_of
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.values import properties, values_in_text

MAX_CALLS = 4
REUSE_PROBABILITY = 0.85
"""The probability that an argument comes from an earlier call, if such a call has it."""
CHAIN_WEIGHT = 4.0
"""The factor of the weight of a tool with a parameter that an earlier call provides."""
QUESTIONS_PER_USE = 25
"""The number of tasks of an SQL tool that count as one task of another tool, since SQL tools allow
more questions."""
MAX_REFUSALS = 3
MAX_RESULT_CHARS = 2000


class Coverage:
    """How often tools and pairs of tools have been used."""

    def __init__(self) -> None:
        self.tools: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.answers: Counter[tuple[str, str]] = Counter()
        """Counts pairs of the last tool and the value that the agent has to say."""
        self.fruitless: Counter[str] = Counter()
        """Maps the last tool to the number of walks to it that gave no new task."""

    def add(self, tools: Sequence[str], answer: str | None) -> None:
        """Counts a scenario that became a task."""
        self.tools.update(tools)
        self.pairs.update(pairs_of(tools))
        if answer is not None:
            self.answers[tools[-1], answer] += 1

    def weight(self, tool: str, before: str | None, has_questions: bool = False) -> float:
        """The weight of a tool as the next tool of a walk."""
        pair = 0 if before is None else self.pairs[before, tool]
        variety = QUESTIONS_PER_USE if has_questions else 1
        uses = self.tools[tool] + self.fruitless[tool]
        return 1.0 / (1.0 + uses / variety) / (1.0 + pair / variety)


async def walk(
    tools: AttemptTools,
    survey: Survey,
    used: Coverage,
    draw: random.Random,
    num_calls: int,
    start: Sequence[ScenarioStep] = (),
) -> tuple[list[ScenarioStep], list[CallResult]]:
    """A walk of at most `num_calls` calls in a session of its own, after the calls of `start`,
    which are already made in that session. Also returns every call with its result. `survey` learns
    nothing from them here. A refused call may name values, which come before all others in this
    world. After MAX_REFUSALS refusals the walk ends."""
    results: list[CallResult] = []
    steps = list(start)
    named = dict[str, list[Any]]()
    refusals = 0
    while len(steps) < len(start) + num_calls and refusals < MAX_REFUSALS:
        names = survey.usable
        before = steps[-1].tool if steps else None
        weights = [
            used.weight(candidate, before, candidate in survey.databases)
            * _chains(survey, steps, candidate)
            for candidate in names
        ]
        (name,) = draw.choices(names, weights)
        if name in survey.databases:
            step, result = await _ask_database(
                tools, survey, name, survey.databases[name].draw(draw)
            )
            results.append(result)
            steps += [step] if step is not None else []
            refusals += step is None
            continue

        sources = _find_argument(survey, steps, name, draw)
        fixed = {parameter: value for parameter, (_, value) in sources.items()}
        for parameter in properties(survey.schemas[name]):
            if parameter not in fixed and named.get(parameter):
                fixed[parameter] = draw.choice(named[parameter])

        arguments = survey.draw_arguments(name, draw, fixed)
        result = await call_tool(tools, name, arguments)
        results.append(result)

        if result.is_error or len(result.text) > MAX_RESULT_CHARS:
            refusals += 1
            for parameter, schema in properties(survey.schemas[name]).items():
                if values := list(values_in_text(result.text, parameter, schema)):
                    named[parameter] = values
            continue

        steps.append(
            ScenarioStep(
                tool=name,
                arguments=arguments,
                found={parameter: source for parameter, (source, _) in sources.items()},
                result=result.text,
                changes=name in survey.changing,
            )
        )

    return steps, results


async def extend_question(
    tools: AttemptTools, survey: Survey, start: Sequence[ScenarioStep], draw: random.Random
) -> tuple[list[ScenarioStep], list[CallResult]]:
    """The same calls with a further condition in the question of the last call. Empty if there is
    no harder question, or if the tool no longer exists."""
    last = start[-1]
    database = survey.databases.get(last.tool)
    if database is None or last.question is None:
        return [], []

    question = database.draw(draw, last.question)
    if question.clauses <= last.question.clauses:
        return [], []

    step, result = await _ask_database(tools, survey, last.tool, question)
    return ([*start[:-1], step] if step is not None else []), [result]


async def _ask_database(
    tools: AttemptTools, survey: Survey, tool: str, question: DatabaseQuestion
) -> tuple[ScenarioStep | None, CallResult]:
    """A question to a database, and its result. No step if the database returns no answer."""
    arguments = {survey.databases[tool].parameter: question.sql}
    result = await call_tool(tools, tool, arguments)
    if result.is_error or len(result.text) > MAX_RESULT_CHARS:
        return None, result
    return ScenarioStep(
        tool=tool, arguments=arguments, question=question, result=result.text
    ), result


def prune_steps(steps: Sequence[ScenarioStep]) -> list[ScenarioStep]:
    """The steps without superfluous calls: those that change nothing and whose result no other step
    uses. If no call changes anything, the last call and the calls that it needs."""
    has_state = any(step.changes for step in steps)
    kept_steps: set[int] = set()
    for number in reversed(range(len(steps))):
        is_goal = steps[number].changes if has_state else number == len(steps) - 1
        if is_goal or number in kept_steps:
            kept_steps.add(number)
            kept_steps |= {source.step for source in steps[number].found.values()}

    places = {number: index for index, number in enumerate(sorted(kept_steps))}
    return [
        msgspec.structs.replace(
            steps[number],
            found={
                name: ValueSource(step=places[source.step], name=source.name)
                for name, source in steps[number].found.items()
            },
        )
        for number in sorted(kept_steps)
    ]


def _chains(survey: Survey, steps: Sequence[ScenarioStep], tool: str) -> float:
    gives = any(
        _first_source(survey, steps, tool, name) for name in properties(survey.schemas[tool])
    )
    return CHAIN_WEIGHT if gives else 1.0


def _find_argument(
    survey: Survey, steps: Sequence[ScenarioStep], tool: str, draw: random.Random
) -> dict[str, tuple[ValueSource, Any]]:
    """Arguments from earlier calls, each with its value."""
    taken = {}
    for name in properties(survey.schemas[tool]):
        first = _first_source(survey, steps, tool, name)
        if first is not None and draw.random() < REUSE_PROBABILITY:
            taken[name] = first
    return taken


def _first_source(
    survey: Survey, steps: Sequence[ScenarioStep], tool: str, name: str
) -> tuple[ValueSource, Any] | None:
    """The source of a value: the newest call that changes nothing and names the parameter, with the
    first value that the agent does not receive."""
    schema = properties(survey.schemas[tool])[name]
    past_values = [value for step in steps for value in step.arguments.values()]
    for number in reversed(range(len(steps))):
        if steps[number].changes:
            return None  # an earlier result may no longer be true
        value = first_value(steps[number].result, name, schema)
        if value is not None and value not in past_values:
            return ValueSource(step=number, name=name), value

    return None


def first_value(text: str, name: str, schema: dict[str, Any] | Any) -> Any:
    """The first value of a parameter that a result names. None if it names none."""
    return next(iter(values_in_text(text, name, schema)), None)
