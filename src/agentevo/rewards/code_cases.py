"""The forms of code tests in the rows of tasks.

    asserts             a program, or a list of statements (MBPP's `test_list`, HumanEval's `test`
                        with its `entry_point`, `{assert_case: [...]}`), with a `test_setup_code`
    input and output    {inputs: [stdin, ...], outputs: [stdout, ...]} (APPS, TACO, verl's
                        prime_code), or a list of {input, output}
    calls               the same with `fn_name`: the inputs are lists of arguments, the outputs what
                        the function returns; LiveCodeBench's {testtype: functional} with
                        `metadata.func_name`

Each form can also be a JSON string, as in verl's `ground_truth`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.runtime.parsing import ParseError, parse_json
from agentevo.types import Task

KEYS = ("tests", "test_list", "test_cases", "input_output", "public_test_cases", "test")
"""The columns for tests, in the order of the search. If none of them has tests, the task's answer
is read."""
TOLERANCE = 1e-6


@dataclass(frozen=True)
class CodeTests:
    """The tests of one task. One of `asserts`, `pairs` and `calls` is not empty."""

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
    """The first `most` tests of a task. Raises ValueError for a task without tests, and for tests
    in another form."""
    metadata = task.metadata
    names = (key,) if key is not None else KEYS
    from_metadata = next((metadata[name] for name in names if metadata.get(name)), None)
    raw_tests = from_metadata if from_metadata is not None or key is not None else task.answer
    if not raw_tests:
        raise ValueError(
            f"the task {task.id!r} has no tests: give its row {key or 'tests'}, such as "
            '{"inputs": ["1 2"], "outputs": ["3"]} or a list of asserts'
        )

    tests = _read(_parse(raw_tests), metadata, most)
    if not tests.number:
        raise ValueError(f"the tests of the task {task.id!r} are empty: give at least one")

    return tests


def _parse(raw: Any) -> Any:
    """The value of a JSON text. Any other value is returned unchanged."""
    if isinstance(raw, str) and raw.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(raw)
        except ParseError:
            return raw
    return raw


def _read(raw_tests: Any, metadata: Mapping[str, Any], most: int) -> CodeTests:
    if isinstance(raw_tests, Mapping):
        if "assert_case" in raw_tests:
            return _asserts(raw_tests["assert_case"], metadata, most)
        return _pairs(raw_tests, str(raw_tests.get("fn_name") or ""), most)

    if isinstance(raw_tests, str):
        return _asserts([raw_tests], metadata, most)
    if isinstance(raw_tests, Sequence) and all(isinstance(test, str) for test in raw_tests):
        return _asserts(raw_tests, metadata, most)

    if isinstance(raw_tests, Sequence) and all(isinstance(test, Mapping) for test in raw_tests):
        columns = {
            "inputs": [test.get("input") for test in raw_tests],
            "outputs": [test.get("output") for test in raw_tests],
        }
        inner_metadata = metadata.get("metadata")
        about = _parse(inner_metadata) if inner_metadata is not None else {}
        name = metadata.get("fn_name") or metadata.get("func_name")
        if not name and isinstance(about, Mapping):
            name = about.get("func_name")

        return _pairs(columns, str(name or ""), most)

    raise ValueError(f"tests are {type(raw_tests).__name__}: give asserts, or inputs with outputs")


def _asserts(asserts: Any, metadata: Mapping[str, Any], most: int) -> CodeTests:
    if not isinstance(asserts, Sequence) or not all(isinstance(test, str) for test in asserts):
        raise ValueError("the asserts are not a list of texts")

    tests = tuple(asserts[:most])
    name = metadata.get("entry_point")
    if isinstance(name, str) and name.isidentifier():
        tests = tuple(
            f"{test}\ncheck({name})" if "def check(" in test and "\ncheck(" not in test else test
            for test in tests
        )

    return CodeTests(asserts=tests, setup=str(metadata.get("test_setup_code") or ""))


def _pairs(columns: Mapping[str, Any], function: str, most: int) -> CodeTests:
    inputs = columns.get("inputs")
    outputs = columns.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("tests need inputs and outputs, both lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")

    cases = list(zip(inputs, outputs, strict=True))[:most]
    if not function:
        return CodeTests(
            pairs=tuple((_text(raw_input), _text(raw_output)) for raw_input, raw_output in cases)
        )

    calls = tuple((_arguments(raw_input), _value(raw_output)) for raw_input, raw_output in cases)
    return CodeTests(calls=calls, function=function)


def _text(value: Any) -> str:
    """The value as text. A list becomes lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(raw: Any) -> list[Any]:
    """The arguments: a list unchanged, or a text with a JSON value on each line."""
    if isinstance(raw, str):
        return [_value(line) for line in raw.split("\n") if line.strip()]
    return raw if isinstance(raw, list) else [raw]


def _value(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return parse_json(raw)
    except ParseError:
        return raw


def is_right_value(value: Any, right: Any) -> bool:
    """Whether a function returned the right value, which TACO writes as a list with a single
    element."""
    if same_value(value, right):
        return True
    return isinstance(right, list) and len(right) == 1 and same_value(value, right[0])


def same_value(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal. Numbers may differ by TOLERANCE, and true is not 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return first == second or math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            same_value(first[key], second[key]) for key in first
        )
    return bool(type(first) is type(second) and first == second)


def is_right_output(output: str, right: str) -> bool:
    """Whether a program printed the right output: the same words on each line, except for blanks
    and empty lines at the end. Numbers with a decimal point may differ by TOLERANCE."""
    lines = [[line.split() for line in text.strip().split("\n")] for text in (output, right)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(
        _same_word(word, expected_word)
        for line, expected_line in zip(*lines, strict=True)
        for word, expected_word in zip(line, expected_line, strict=True)
    )


def _same_word(first: str, second: str) -> bool:
    if first == second:
        return True
    if "." not in first + second or max(len(first), len(second)) > 40:
        return False

    try:
        return math.isclose(float(first), float(second), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
