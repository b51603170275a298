"""Random call sequences (walks). Each call runs on the server before the next one is chosen. Tools,
and pairs of consecutive tools, have a higher probability the less they were used. The agent
receives the arguments of a call, or finds them in results of earlier calls of the walk.

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
UNSTABLE_WEIGHT = 0.1
"""The factor of the weight of a tool whose results differ each time."""
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
        """Counts pairs of the last tool and the right answer."""
        self.fruitless: Counter[str] = Counter()
        """Maps a tool to the number of walks that ended with it and gave no new task."""

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
    coverage: Coverage,
    draw: random.Random,
    num_calls: int,
    start: Sequence[ScenarioStep] = (),
) -> tuple[list[ScenarioStep], list[CallResult]]:
    """A walk of at most `num_calls` calls in a session, after the calls of `start`, which the
    session has already made. Also returns every call with its result; the caller updates `survey`
    with them. If a refusal names values of a parameter, later calls of the walk use these values.
    The walk ends after MAX_REFUSALS refusals."""
    results: list[CallResult] = []
    steps = list(start)
    refusal_values = dict[str, list[Any]]()
    refusals = 0
    while len(steps) < len(start) + num_calls and refusals < MAX_REFUSALS:
        names = survey.usable
        before = steps[-1].tool if steps else None
        weights = [
            coverage.weight(candidate, before, candidate in survey.databases)
            * _chain_weight(survey, steps, candidate)
            * (UNSTABLE_WEIGHT if candidate in survey.unstable else 1.0)
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
        fixed_arguments = {parameter: value for parameter, (_, value) in sources.items()}
        for parameter in properties(survey.schemas[name]):
            if parameter not in fixed_arguments and refusal_values.get(parameter):
                fixed_arguments[parameter] = draw.choice(refusal_values[parameter])

        arguments = survey.draw_arguments(name, draw, fixed_arguments)
        result = await call_tool(tools, name, arguments)
        results.append(result)

        if result.is_error or len(result.text) > MAX_RESULT_CHARS:
            refusals += 1
            for parameter, schema in properties(survey.schemas[name]).items():
                if values := list(values_in_text(result.text, parameter, schema)):
                    refusal_values[parameter] = values
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
    """The calls of `start`, with a further condition in the question of the last call, and the
    result of that call. Empty if there is no harder question, or if the tool no longer exists."""
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
    """Asks a database a question. Returns the step (None if there is no answer) and the result."""
    arguments = {survey.databases[tool].parameter: question.sql}
    result = await call_tool(tools, tool, arguments)
    if result.is_error or len(result.text) > MAX_RESULT_CHARS:
        return None, result
    return ScenarioStep(
        tool=tool, arguments=arguments, question=question, result=result.text
    ), result


def prune_steps(steps: Sequence[ScenarioStep]) -> list[ScenarioStep]:
    """The steps without calls that change nothing and whose result no other step uses. If no call
    changes anything, only the last call and the calls that it needs remain."""
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


def _chain_weight(survey: Survey, steps: Sequence[ScenarioStep], tool: str) -> float:
    has_source = any(
        _first_source(survey, steps, tool, name) for name in properties(survey.schemas[tool])
    )
    return CHAIN_WEIGHT if has_source else 1.0


def _find_argument(
    survey: Survey, steps: Sequence[ScenarioStep], tool: str, draw: random.Random
) -> dict[str, tuple[ValueSource, Any]]:
    """Maps a parameter to the source of its value in an earlier call, and the value."""
    sources = {}
    for name in properties(survey.schemas[tool]):
        first = _first_source(survey, steps, tool, name)
        if first is not None and draw.random() < REUSE_PROBABILITY:
            sources[name] = first
    return sources


def _first_source(
    survey: Survey, steps: Sequence[ScenarioStep], tool: str, name: str
) -> tuple[ValueSource, Any] | None:
    """The source of a value, and the value: the newest call whose result has a value of the
    parameter that the agent does not receive. None if there is none after the last call that
    changes the state."""
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
    """The first value of a parameter in a result. None if the result has none."""
    return next(iter(values_in_text(text, name, schema)), None)
