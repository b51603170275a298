"""Runs a scenario to find what solves it: the final state, or the value that the scenario asks for.

The scenario's calls run in a new session, between two rounds of the same questions. Answers that
differ after the calls are the state that an agent must reach. Answers that are equal must stay as
they are. A second session must give the same results. A result with the time of day, for example,
gives no task. So no task asks for a state that exists without any action, or that can't be reached
again.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from agentevo.agents.tools.state_checks import StateCheck
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo_evolve.task_making.calls import ToolWorld, call_all, call_tool
from agentevo_evolve.task_making.databases import answer_of
from agentevo_evolve.task_making.questions import DatabaseQuestion
from agentevo_evolve.task_making.scenario import Scenario, ScenarioStep
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.values import properties
from agentevo_evolve.task_making.walks import first_value

MAX_QUESTIONS = 16
MAX_CHECKS = 8
MAX_COMBINATIONS = 256
MAX_GUESSES = 4
"""The number of questions of a tool whose arguments are not from the walk."""
MAX_ANSWER_CHARS = 120


class UngroundedError(Exception):
    """A scenario that can't become a task. The maker counts the reasons. `varies`: the results or
    the final state of the calls differ each time."""

    def __init__(self, words: str, *, varies: bool = False) -> None:
        super().__init__(words)
        self.varies = varies


async def ground_scenario(
    world: ToolWorld,
    survey: Survey,
    steps: Sequence[ScenarioStep],
    number: int,
    draw: random.Random,
) -> Scenario:
    """Runs these calls in the world with that number, and returns the scenario. Raises
    UngroundedError."""
    has_state = any(step.changes for step in steps)
    questions = _questions(survey, steps, draw) if has_state else []
    async with world.open(number) as tools:
        before = await call_all(tools, questions)
        grounded = await _run_steps(tools, survey, steps)
        after = await call_all(tools, questions)
        value = None if has_state else await _value(tools, survey, grounded[-1])

    async with world.open(number, seed=1) as tools:  # the state in another attempt's session
        repeated = await _run_steps(tools, survey, steps)
        if [step.result for step in repeated] != [step.result for step in grounded]:
            raise UngroundedError("its calls give something else the second time", varies=True)
        now = await call_all(tools, questions)
        if [reply.text for reply in now] != [reply.text for reply in after]:
            raise UngroundedError("it leaves another state the second time", varies=True)

    if value is not None:
        return Scenario(steps=grounded, world=number, answer=value)

    if not has_state:
        answer, place = _answer(grounded[-1].result, draw)
        return Scenario(steps=grounded, world=number, answer=answer, place=place)

    if any(reply.is_lost for reply in (*before, *after)):
        raise UngroundedError("the state could not be asked")

    pairs = list(zip(before, after, strict=True))
    changed = [now for was, now in pairs if was.text != now.text]
    if not changed:
        raise UngroundedError("it changes nothing that another tool tells")

    same = [now for was, now in pairs if was.text == now.text and not now.is_error]
    checks = [
        StateCheck(tool=reply.tool, arguments=reply.arguments, result=reply.text)
        for reply in [*changed, *same][:MAX_CHECKS]
    ]
    return Scenario(steps=grounded, world=number, checks=checks)


async def _run_steps(
    tools: AttemptTools, survey: Survey, steps: Sequence[ScenarioStep]
) -> list[ScenarioStep]:
    """The calls with their new results. The results must have the values that the agent has to
    find."""
    carried_out: list[ScenarioStep] = []
    for step in steps:
        schemas = properties(survey.schemas[step.tool])
        for name, value_source in step.found.items():
            value = first_value(
                carried_out[value_source.step].result, value_source.name, schemas[name]
            )
            if value != step.arguments[name]:
                raise UngroundedError("what is to be found is not what is found first")

        result = await call_tool(tools, step.tool, step.arguments)
        if result.is_error:
            raise UngroundedError("a call is refused without the calls that were left out")

        carried_out.append(msgspec.structs.replace(step, result=result.text))

    return carried_out


async def _value(tools: AttemptTools, survey: Survey, step: ScenarioStep) -> str | None:
    """The answer to a question to a database. None for other calls."""
    if step.question is None:
        return None

    value = await answer_of(tools, step.tool, survey.databases[step.tool].parameter, step.question)
    if value is None or len(value) > MAX_ANSWER_CHARS or value not in step.result:
        raise UngroundedError("its question has not one answer")
    if value in map(str, step.question.required_values.values()):
        raise UngroundedError("its words would say what is to be found")
    return value


def _questions(
    survey: Survey, steps: Sequence[ScenarioStep], draw: random.Random
) -> list[tuple[str, dict[str, Any]]]:
    """Calls that show the final state of these steps. They call every tool that changes nothing,
    with the walk's arguments for its parameters, or else with known values."""
    by_name: dict[str, list[Any]] = {}
    for step in steps:
        for name, value in step.arguments.items():
            by_name.setdefault(name.lower(), []).append(value)

    questions = [(step.tool, step.arguments) for step in steps if not step.changes]
    for tool in survey.read_only_tools:
        if (database := survey.databases.get(tool)) is not None:
            counts = [
                DatabaseQuestion(table=table.name).sql for table in database.tables[:MAX_GUESSES]
            ]
            questions += [(tool, {database.parameter: sql}) for sql in counts]
            continue

        schema = survey.schemas[tool]
        choices = []
        for name, parameter_schema in properties(schema).items():
            if name in (schema.get("required") or ()):
                values = (
                    by_name.get(name.lower())
                    or survey.values.known_values(name, parameter_schema)[-MAX_GUESSES:]
                )
                values = values or [survey.values.draw(name, parameter_schema, draw)]
                choices.append([(name, _freeze(value)) for value in values])

        every = itertools.product(*map(dict.fromkeys, choices))
        combined = list(itertools.islice(every, MAX_COMBINATIONS))
        draw.shuffle(combined)

        for pairs in combined[:MAX_GUESSES]:
            question = (tool, {name: json.loads(value) for name, value in pairs})
            questions += [question] if question not in questions else []

    return questions[:MAX_QUESTIONS]


def _freeze(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _answer(text: str, draw: random.Random) -> tuple[str, str]:
    """The part of a result that the agent must give, and its key in the result's JSON."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None

    while isinstance(tree, list) and tree:
        tree = tree[0]

    if isinstance(tree, dict):
        plain = [
            (str(key), str(value) if not isinstance(value, float) else f"{value:g}")
            for key, value in tree.items()
            if isinstance(value, (str, int, float)) and not isinstance(value, bool)
        ]
        candidates = [entry for entry in plain if 0 < len(entry[1]) <= MAX_ANSWER_CHARS]
        if candidates:
            key, value = draw.choice(candidates)
            return value, key

        raise UngroundedError("its result has nothing short to ask for")

    line = text.strip().split("\n")[0].strip()
    if not 0 < len(line) <= MAX_ANSWER_CHARS or not any(character.isalnum() for character in line):
        raise UngroundedError("its result has nothing short to ask for")

    return line, ""
