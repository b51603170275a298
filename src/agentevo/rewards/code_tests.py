"""The reward `code_tests`: runs the reply's code against the task's tests in a sandbox.

For inputs and outputs, the program starts again for each test. For calls, the function's value is
compared outside of the sandbox, so the code never sees the right answer. Assertions run in the same
process as the code, so code that searches for them can forge their outcome. Inputs and outputs, or
calls, are safer tests for training.

The forms of code tests in the rows of tasks.

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

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import Field, JsonValue

from agentevo.environments.sandbox.sandbox import ProgramRun, Sandbox
from agentevo.errors import SandboxError
from agentevo.rewards.reward import RewardConfig, Score, completion_of, reward
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import ParseError, parse_json
from agentevo.types import Task, Trajectory

KEYS = ("tests", "test_list", "test_cases", "input_output", "public_test_cases", "test")
"""The columns for tests, in the order of the search. If none of them has tests, the task's answer
is read."""
TOLERANCE = 1e-6
LONGEST_ERROR = 200
"""The maximum number of characters of an error in the reason of a score."""


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


RUNNER = Path(__file__).with_name("function_runner.py")
SANDBOX: dict[str, JsonValue] = {
    "output_kib": 4096,
    "file_mib": 64,
    "disk_mib": 128,
    "max_sandboxes": 8,
}
"""The changes to a sandbox's defaults, because whole outputs are compared."""
_PYTHON = ("python", "py", "python3")


class OpensSandboxes(Protocol):
    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """Opens a sandbox, which is closed at the end of the block."""
        ...


def check_result(ran: ProgramRun) -> None:
    """Raises SandboxError if the sandbox's server was lost, because that is not the attempt's
    fault."""
    if ran.server_lost:
        raise SandboxError(f"the sandbox was lost: {ran.error and ran.error.message}")


async def run_program(sandbox: Sandbox, program: bytes, spec: Any, limit_s: float) -> ProgramRun:
    """Runs a program of ours in the sandbox, for at most `limit_s`. It reads `spec` as JSON on
    stdin."""
    await sandbox.write_file("runner.py", program)
    ran = await sandbox.execute(
        ["python", "runner.py"], stdin=json.dumps(spec).encode(), deadline_s=limit_s
    )
    check_result(ran)
    return ran


class CodeTestsConfig(RewardConfig):
    """A reward for code that passes tests."""

    timeout_s: float = Field(default=900.0, gt=0)
    """The time limit of a score, in seconds, including the wait for a sandbox. Beyond it, the
    attempt is recorded as failed."""
    tests_key: str | None = None
    """The column of the row with the tests. Default: the first of tests, test_list, test_cases,
    input_output, public_test_cases and test that the row has, else the answer."""
    partial: bool = False
    """If true, the score is the share of tests that pass. Otherwise it is 1 if all pass, else 0,
    and testing ends with the first failure."""
    test_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """The time limit of a test, in seconds. Beyond it, the test fails."""
    tests_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """The time limit of all tests of an attempt, in seconds. Beyond it, the remaining tests
    fail."""
    max_tests: int = Field(default=100, ge=1)
    """The maximum number of tests of a task that run. Only the first ones are used."""
    sandbox: dict[str, JsonValue] = Field(default_factory=dict)
    """The sandbox of the code: the keys of agent.sandbox, such as {memory_mib: 512, packages:
    true}."""


def code_of(reply: str) -> str:
    """The last block of Python in a reply, else the last block of any language, else the whole
    reply."""
    pieces = reply.split("```")
    blocks = [piece.partition("\n") for piece in pieces[1::2]]
    if len(pieces) % 2 == 0 and len(blocks) > 1:
        blocks.pop()  # the block is not closed

    python = [code for words, _, code in blocks if words.strip().lower() in _PYTHON]
    if not blocks:
        return reply
    return python[-1] if python else blocks[-1][2]


@reward("code_tests")
class CodeTestsReward:
    """1 if the reply's Python code passes the task's tests in a sandbox, or the share of tests that
    it passes."""

    Config = CodeTestsConfig

    def __init__(self, config: CodeTestsConfig) -> None:
        self.config = config
        self.sandbox = SANDBOX | config.sandbox

    async def score(self, trajectory: Trajectory, task: Task, sandboxes: OpensSandboxes) -> Score:
        """See Scorer.score. Raises ValueError for a task without tests, and SandboxError if no
        sandbox can be opened."""
        config = self.config
        tests = cases_of(task, config.tests_key, config.max_tests)

        code = await in_thread(code_of, completion_of(trajectory))
        if not code.strip():
            return Score(0.0)

        async with sandboxes.open() as sandbox:
            work = _Testing(sandbox, code, config)
            result = await (work.programs(tests) if tests.pairs else work.functions(tests))

        if result.setup_error:
            raise ValueError(
                f"the tests of the task {task.id!r} can't run: its test_setup_code raised "
                f"{result.setup_error}"
            )

        share = result.num_passed / tests.number
        value = share if config.partial else float(result.num_passed == tests.number)
        reason = f"{result.num_passed} of {tests.number} tests passed"
        if result.problem:
            reason += f"; {result.problem}"
        return Score(value, success=share == 1, reason=reason)


@dataclass(frozen=True)
class _TestResult:
    """The result of a task's tests."""

    num_passed: int
    problem: str = ""
    """What the code raised first, for people."""
    setup_error: str = ""
    """What the task's own setup raised."""


class _Testing:
    """Runs the tests of one reply's code in one sandbox."""

    def __init__(self, sandbox: Sandbox, code: str, config: CodeTestsConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._code = code.replace("\0", "").encode("utf-8", "replace")
        self._ends = time.monotonic() + config.tests_timeout_s

    def _left_s(self, most: float) -> float:
        return min(most, self._ends - time.monotonic())

    async def programs(self, tests: CodeTests) -> _TestResult:
        """Counts the inputs with the right output."""
        num_passed = 0
        problem = ""
        is_written = False
        for index, (stdin_text, right) in enumerate(tests.pairs):
            remaining_s = self._left_s(self._config.test_timeout_s)
            if remaining_s <= 0:
                break
            if not is_written:
                await self._sandbox.write_file("solution.py", self._code)

            ran = await self._sandbox.execute(
                ["python", "solution.py"],
                stdin=stdin_text.encode("utf-8", "replace"),
                deadline_s=remaining_s,
            )
            check_result(ran)
            is_written = not ran.files_lost
            is_right = ran.exit_code == 0 and await in_thread(is_right_output, ran.stdout, right)
            num_passed += is_right
            if not problem and (ended_by := _describe_end(ran)):
                problem = f"test {index + 1}: {ended_by}"

            if not (is_right or self._config.partial):
                break

        return _TestResult(num_passed, problem)

    async def functions(self, tests: CodeTests) -> _TestResult:
        """Counts the calls with the right value, or the assertions that hold."""
        mark = secrets.token_hex(16)
        spec: dict[str, Any] = {
            "code": self._code.decode(),
            "setup": tests.setup,
            "function": tests.function,
            "calls": [arguments for arguments, _ in tests.calls],
            "asserts": list(tests.asserts),
            "limit_s": self._config.test_timeout_s,
            "mark": mark,
        }
        limit_s = self._left_s(self._config.tests_timeout_s)
        ran = await run_program(self._sandbox, RUNNER.read_bytes(), spec, limit_s)
        values, errors = await in_thread(_read_results, ran.stdout, mark)
        # without a setup, only the code can have written that line
        if tests.setup and "setup" in errors:
            return _TestResult(0, setup_error=errors["setup"])

        if tests.asserts:
            num_passed = sum(values.get(index) is True for index in range(tests.number))
        else:
            num_passed = sum(
                index in values and is_right_value(values[index], right)
                for index, (_, right) in enumerate(tests.calls)
            )

        if num_passed == tests.number:
            return _TestResult(num_passed)
        problem = next((f"{place}: {error}" for place, error in errors.items()), "")
        return _TestResult(num_passed, problem or _describe_end(ran))


def _describe_end(ran: ProgramRun) -> str:
    """Why a program failed: the limit that ended it, or the last line of its traceback. Empty for a
    program that ended without an error."""
    if ran.error is not None:
        return ran.error.message
    if ran.exit_code == 0:
        return ""
    last_line = ran.stderr.rstrip().rpartition("\n")[2][:LONGEST_ERROR]
    return last_line or f"exit code {ran.exit_code}"


def _read_results(stdout: str, mark: str) -> tuple[dict[int, Any], dict[str, str]]:
    """What the runner wrote: the value of each test by its index, and the errors in their order by
    their place, such as `code` or `test 2`."""
    values: dict[int, Any] = {}
    errors: dict[str, str] = {}
    for line in stdout.split("\n"):
        if line.startswith(f"{mark} "):
            try:
                result = msgspec.json.decode(line[len(mark) :])
                if "error" in result:
                    place = result.get("failed") or f"test {result['index'] + 1}"
                    errors[place] = str(result["error"])[:LONGEST_ERROR]
                else:
                    values[result["index"]] = result["value"]
            except (msgspec.MsgspecError, LookupError, TypeError, RecursionError, AttributeError):
                continue

    return values, errors
