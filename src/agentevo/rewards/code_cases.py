"""Tests of code as rows have them.

    asserts             a program, or a list of statements (MBPP's `test_list`, HumanEval's `test`
                        with its `entry_point`, `{assert_case: [...]}`), with a `test_setup_code`
    input and output    {inputs: [stdin, ...], outputs: [stdout, ...]} (APPS, TACO, verl's
                        prime_code), or a list of {input, output}
    calls               the same with `fn_name`: the inputs are lists of arguments, the outputs what
                        the function returns; LiveCodeBench's {testtype: functional} with
                        `metadata.func_name`

Each of them may be JSON in a text, as verl's `ground_truth` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.parsing import ParseError, parse_json
from agentevo.types import Task

KEYS = ("tests", "test_list", "test_cases", "input_output", "public_test_cases", "test")
"""Columns that hold tests, in the order in which they are looked for; the answer comes last."""
TOLERANCE = 1e-6


@dataclass(frozen=True)
class CodeTests:
    """The tests of one task; one of the three lists is not empty."""

    asserts: tuple[str, ...] = ()
    setup: str = ""
    pairs: tuple[tuple[str, str], ...] = ()
    """(stdin, stdout)"""
    calls: tuple[tuple[list[Any], Any], ...] = ()
    """(arguments, value)"""
    function: str = ""

    @property
    def number(self) -> int:
        return len(self.asserts) + len(self.pairs) + len(self.calls)


def cases_of(task: Task, key: str | None, most: int) -> CodeTests:
    """The first `most` tests of a task. Raises ValueError for a task without, and for what is in
    none of the module's forms."""
    metadata = task.metadata
    names = (key,) if key is not None else KEYS
    found = next((metadata[name] for name in names if metadata.get(name)), None)
    given = found if found is not None or key is not None else task.answer
    if not given:
        raise ValueError(
            f"the task {task.id!r} has no tests: give its row {key or 'tests'}, such as "
            '{"inputs": ["1 2"], "outputs": ["3"]} or a list of asserts'
        )

    tests = _read(_parse(given), metadata, most)
    if not tests.number:
        raise ValueError(f"the tests of the task {task.id!r} are empty: give at least one")

    return tests


def _parse(given: Any) -> Any:
    """What a text holds, if that is JSON."""
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(given)
        except ParseError:
            return given
    return given


def _read(given: Any, metadata: Mapping[str, Any], most: int) -> CodeTests:
    if isinstance(given, Mapping):
        if "assert_case" in given:
            return _asserts(given["assert_case"], metadata, most)
        return _pairs(given, str(given.get("fn_name") or ""), most)

    if isinstance(given, str):
        return _asserts([given], metadata, most)
    if isinstance(given, Sequence) and all(isinstance(one, str) for one in given):
        return _asserts(given, metadata, most)

    if isinstance(given, Sequence) and all(isinstance(one, Mapping) for one in given):
        columns = {
            "inputs": [one.get("input") for one in given],
            "outputs": [one.get("output") for one in given],
        }
        own = metadata.get("metadata")
        about = _parse(own) if own is not None else {}
        name = metadata.get("fn_name") or metadata.get("func_name")
        if not name and isinstance(about, Mapping):
            name = about.get("func_name")

        return _pairs(columns, str(name or ""), most)

    raise ValueError(f"tests are {type(given).__name__}: give asserts, or inputs with outputs")


def _asserts(given: Any, metadata: Mapping[str, Any], most: int) -> CodeTests:
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ValueError("the asserts are no list of texts")

    tests = tuple(given[:most])
    name = metadata.get("entry_point")
    if isinstance(name, str) and name.isidentifier():
        tests = tuple(
            f"{test}\ncheck({name})" if "def check(" in test and "\ncheck(" not in test else test
            for test in tests
        )

    return CodeTests(asserts=tests, setup=str(metadata.get("test_setup_code") or ""))


def _pairs(given: Mapping[str, Any], function: str, most: int) -> CodeTests:
    inputs = given.get("inputs")
    outputs = given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("tests need inputs and outputs, both lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")

    both = list(zip(inputs, outputs, strict=True))[:most]
    if not function:
        return CodeTests(pairs=tuple((_text(one), _text(two)) for one, two in both))

    calls = tuple((_arguments(one), _value(two)) for one, two in both)
    return CodeTests(calls=calls, function=function)


def _text(given: Any) -> str:
    """A list is its lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _arguments(given: Any) -> list[Any]:
    """A list as it is; a text is a JSON value for each argument, a line each."""
    if isinstance(given, str):
        return [_value(line) for line in given.split("\n") if line.strip()]
    return given if isinstance(given, list) else [given]


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return parse_json(given)
    except ParseError:
        return given


def is_right_value(value: Any, right: Any) -> bool:
    """Whether a function gave what it should; TACO writes that as a list of one."""
    if same_value(value, right):
        return True
    return isinstance(right, list) and len(right) == 1 and same_value(value, right[0])


def same_value(one: Any, two: Any) -> bool:
    """Whether two JSON values are alike; numbers may differ by TOLERANCE, and true is no 1."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one == two or math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same_value, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same_value(one[key], two[key]) for key in one)
    return bool(type(one) is type(two) and one == two)


def is_right_output(said: str, right: str) -> bool:
    """Whether a program printed what it should: the same words line by line, blanks and empty lines
    at the end aside; numbers with a point may differ by TOLERANCE."""
    lines = [[line.split() for line in text.strip().split("\n")] for text in (said, right)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(
        _same_word(one, two)
        for line, other in zip(*lines, strict=True)
        for one, two in zip(line, other, strict=True)
    )


def _same_word(one: str, two: str) -> bool:
    if one == two:
        return True
    if "." not in one + two or max(len(one), len(two)) > 40:
        return False

    try:
        return math.isclose(float(one), float(two), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
