"""Calls of readers, which show the state of a server. A change is visible only to a reader that is
asked about the changed object, so readers receive the arguments of the calls that change something:
by the names of their parameters, and for texts also by the type.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentevo_evolve.task_making.questions import DatabaseQuestion
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.values import is_text, normalize_name, properties, singular_name

MAX_COMBINATIONS = 256
MAX_VARIANTS = 4
"""The maximum number of calls of one reader."""


def reader_calls(
    survey: Survey,
    readers: Sequence[str],
    arguments: Sequence[Mapping[str, Any]],
    draw: random.Random,
) -> list[tuple[str, dict[str, Any]]]:
    """Calls of these readers that show the objects in `arguments`, the arguments of other calls.
    Parameters without a value there get known or made-up values."""
    values_by_name: dict[str, list[Any]] = {}
    for call_arguments in arguments:
        for name, value in _leaves("", call_arguments):
            values_by_name.setdefault(normalize_name(name), []).append(value)

    calls: list[tuple[str, dict[str, Any]]] = []
    for tool in readers:
        if (database := survey.databases.get(tool)) is not None:
            counts = [
                DatabaseQuestion(table=table.name).sql for table in database.tables[:MAX_VARIANTS]
            ]
            calls += [(tool, {database.parameter: sql}) for sql in counts]
            continue

        choices = _argument_choices(survey, tool, values_by_name, draw)
        combinations = list(
            itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS)
        )
        draw.shuffle(combinations)
        for combination in combinations[:MAX_VARIANTS]:
            pairs = zip(choices, combination, strict=True)
            call = (tool, {name: json.loads(value) for name, value in pairs})
            calls += [call] if call not in calls else []

    return calls


def _argument_choices(
    survey: Survey, tool: str, values_by_name: Mapping[str, Sequence[Any]], draw: random.Random
) -> dict[str, list[str]]:
    """Maps each required parameter of a reader to its possible values, as JSON."""
    schema = survey.schemas[tool]
    texts = [value for values in values_by_name.values() for value in values if is_text(value)]
    choices = {}
    for name, parameter_schema in properties(schema).items():
        if name not in (schema.get("required") or ()):
            continue

        is_list = parameter_schema.get("type") == "array"
        key = normalize_name(singular_name(name) if is_list else name)
        values = list(values_by_name.get(key, ()))
        values += [
            value
            for other, others in values_by_name.items()
            if other != key and other.endswith(f"_{key}")
            for value in others
        ]
        if is_list:
            values = [[value] for value in values or texts]

        known_values = survey.values.known_values(name, parameter_schema)
        is_open = not is_list and parameter_schema.get("type") == "string"
        if not values and is_open and not known_values:
            values = texts

        values = values or known_values[-MAX_VARIANTS:]
        values = values or [survey.values.draw(name, parameter_schema, draw, schema)]
        choices[name] = list(dict.fromkeys(json.dumps(value, sort_keys=True) for value in values))

    return choices


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values within arguments, with the names of their parameters."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(str(key), item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(singular_name(name), item)
    else:
        yield name, value
