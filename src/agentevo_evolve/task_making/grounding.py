"""Runs a scenario to find what solves it: the final state, or the value that the scenario asks for.

The scenario's calls run in a new session, between two rounds of the same questions. Answers that
differ after the calls are the state that an agent must reach. Answers that are equal must stay as
they are. A second session must give the same results. A result with the time of day, for example,
gives no task. So no task asks for a state that exists without any action, or that can't be reached
again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any

import msgspec

from agentevo.agents.tools.state_checks import StateCheck
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo_evolve.task_making.calls import ToolWorld, call_all, call_tool
from agentevo_evolve.task_making.databases import answer_of
from agentevo_evolve.task_making.readers import reader_calls
from agentevo_evolve.task_making.scenario import ANY_PART, Scenario, ScenarioStep
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.values import properties
from agentevo_evolve.task_making.walks import first_value
from agentevo_evolve.task_making.wording import contains, shown

MAX_QUESTIONS = 16
MAX_CHECKS = 8
MAX_ANSWER_CHARS = 120
MIN_RESULTS = 3
"""The number of a tool's different calls that show which answer is always the same."""
MAX_SAME_SHARE = 0.5
"""The largest share of a tool's calls with the same answer. Beyond it, an answer can be guessed."""
EMPTY_ANSWERS = frozenset(["done", "ok", "okay", "success", "true", "false", "none", "null", "yes"])
_ERROR = re.compile(r"(?:[^\s:]+: )?(?:[a-z]+ )?error\b\s*[:-]", re.IGNORECASE)
"""The start of an answer that is the message of an error, also of an error with one of several
paths: "/a.txt: Error - no such file"."""
_VALUE = "\0"
"""Stands for a value of the call in an answer."""


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
    answer: str | None = None,
) -> Scenario:
    """Runs these calls in the world with that number, and returns the scenario. `answer`: what the
    last result must contain if no call changes anything. By default, a random part of that result
    is the answer. Raises UngroundedError."""
    has_state = any(step.changes for step in steps)
    questions = _questions(survey, steps, draw) if has_state else []
    async with world.open(number) as tools:
        before = await call_all(tools, questions)
        grounded = await _run_steps(tools, survey, steps, questions)
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
        answer, place = _answer(survey, grounded[-1], draw, answer)
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
    return Scenario(
        steps=grounded,
        world=number,
        checks=checks,
        num_changed=min(len(changed), MAX_CHECKS),
    )


def _check_answer(survey: Survey, step: ScenarioStep, answer: str, place: str) -> None:
    """Raises UngroundedError for an answer that can be had without the call: the tool gives it, or
    one that only repeats the call's arguments, for most arguments. Also for the message of an
    error, and for an answer that holds only today."""
    if answer.lower().strip(" .!") in EMPTY_ANSWERS:
        raise UngroundedError("its answer says nothing")
    if any(day in answer for day in _days()):
        raise UngroundedError("its answer holds only today")
    if _ERROR.match(answer):
        raise UngroundedError("its answer is the message of an error")
    if len(answer) == 1:
        raise UngroundedError("its answer is too short to be no guess")

    pattern = _pattern(answer, step.arguments) or ""
    if not any(map(str.isalnum, pattern)):
        raise UngroundedError("its answer repeats the call")

    results = survey.results.get(step.tool, {})
    patterns = [
        _pattern(_value_at(result.text, place), result.arguments) for result in results.values()
    ]
    same = sum(
        contains(pattern, other or "") if place == ANY_PART else pattern == other
        for other in patterns
    )
    if step.arguments and len(patterns) < MIN_RESULTS:
        raise UngroundedError(
            "too few results of its tool are known to tell its answer from others"
        )
    if step.arguments and same > MAX_SAME_SHARE * len(patterns):
        raise UngroundedError("its answer is the same, or repeats the call, for most arguments")


def _pattern(answer: str | None, arguments: Mapping[str, Any]) -> str | None:
    """The answer, with a mark in place of each value of the call."""
    if answer is None:
        return None

    items = [
        item
        for value in arguments.values()
        for item in (value if isinstance(value, list) else [value])
    ]
    values = sorted(map(shown, items), key=len, reverse=True)
    for value in filter(None, values):
        answer = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", _VALUE, answer)
    return answer


async def _run_steps(
    tools: AttemptTools,
    survey: Survey,
    steps: Sequence[ScenarioStep],
    questions: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[ScenarioStep]:
    """The calls with their new results. The results must have the values that the agent has to
    find, and each call that changes the state must change the results of the questions."""
    carried_out: list[ScenarioStep] = []
    shown_state: list[str] = []
    for step in steps:
        schemas = properties(survey.schemas[step.tool])
        for name, value_source in step.found.items():
            result_text = carried_out[value_source.step].result
            wanted = step.arguments[name]
            if not value_source.name and not contains(shown(wanted), result_text):
                raise UngroundedError("what is to be found is not there")
            if value_source.name and wanted != first_value(
                result_text, value_source.name, schemas[name]
            ):
                raise UngroundedError("what is to be found is not what is found first")

        if step.changes and questions:
            shown_state = [reply.text for reply in await call_all(tools, questions)]
        result = await call_tool(tools, step.tool, step.arguments)
        if step.changes and questions:
            state = [reply.text for reply in await call_all(tools, questions)]
            if state == shown_state:
                raise UngroundedError("one of its calls changes nothing that another tool tells")

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
    """Calls that show the state which these steps change. All are calls of tools that are known to
    change nothing, because they run after every attempt."""
    changing_arguments = [step.arguments for step in steps if step.changes]
    questions = [
        (step.tool, step.arguments) for step in steps if step.tool in survey.read_only_tools
    ]
    for call in reader_calls(survey, survey.read_only_tools, changing_arguments, draw):
        questions += [call] if call not in questions else []
    return questions[:MAX_QUESTIONS]


def _answer(
    survey: Survey, step: ScenarioStep, draw: random.Random, wanted: str | None
) -> tuple[str, str]:
    """The part of a result that the agent must give, and its place in the result's JSON. `wanted`:
    see ground_scenario. Raises UngroundedError if no part needs the call, or `wanted` doesn't."""
    places = _places(step.result)
    if places is None:
        places = {"": step.result.strip().split("\n")[0].strip()}

    if wanted is not None:
        if not wanted:
            raise UngroundedError("its calls change nothing, and it has no answer")
        if len(wanted) > MAX_ANSWER_CHARS or not contains(wanted, step.result):
            raise UngroundedError("its answer is no short part of the last result that it needs")
        place = next((place for place, value in places.items() if value == wanted), ANY_PART)
        _check_answer(survey, step, wanted, place)
        return wanted, place

    short = [
        (value, place)
        for place, value in places.items()
        if len(value) <= MAX_ANSWER_CHARS and any(map(str.isalnum, value))
    ]
    problem = UngroundedError("its result has nothing short to ask for")
    for answer, place in draw.sample(short, len(short)):
        try:
            _check_answer(survey, step, answer, place)
            return answer, place
        except UngroundedError as error:
            problem = error

    raise problem


def _value_at(text: str, place: str) -> str | None:
    """The value at a place of a result. None if the result has no such place."""
    if place == ANY_PART:
        return text
    if place:
        return (_places(text) or {}).get(place)
    return text.strip().split("\n")[0].strip()


def _places(text: str) -> dict[str, str] | None:
    """The first value of each key of a result's JSON, by the key, or by the keys of both levels
    ("name of owner"). None for a result that is not an object or a list of objects."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return None

    while isinstance(tree, list) and tree:
        tree = tree[0]
    if not isinstance(tree, dict):
        return None

    places: dict[str, str] = {}
    for key, value in tree.items():
        while isinstance(value, list) and value:
            value = value[0]
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, leaf in parts:
            if isinstance(leaf, (str, int, float)) and not isinstance(leaf, bool):
                shown_leaf = f"{leaf:g}" if isinstance(leaf, float) else str(leaf)
                places[f"{part} of {key}" if part else str(key)] = _short_time(shown_leaf)

    return places


def _short_time(value: str) -> str:
    """The time of day of a date and time of today, which is all of it that holds tomorrow; other
    values as they are."""
    match = re.match(rf"(?:{'|'.join(_days())})T(\d\d:\d\d)", value)
    return match[1] if match is not None else value


def _days() -> list[str]:
    """Today, and the days before and after it, which it is in other time zones."""
    return [(date.today() + timedelta(days=days)).isoformat() for days in (-1, 0, 1)]
