"""The reward `code_tests`: runs the reply's code against the task's tests in a sandbox.

For inputs and outputs, the program starts again for each test. For calls, the function's value is
compared outside of the sandbox, so the code never sees the right answer. Assertions run in the same
process as the code, so code that searches for them can forge their outcome. Inputs and outputs, or
calls, are safer tests for training.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import Field, JsonValue

from agentevo.environments.sandbox.sandbox import ProgramRun, Sandbox
from agentevo.errors import SandboxError
from agentevo.rewards.code_cases import CodeTests, cases_of, is_right_output, is_right_value
from agentevo.rewards.reward import RewardConfig, Score, completion_of, reward
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Task, Trajectory

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
    """Opens sandboxes for a scorer."""

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """Opens a sandbox, which is closed at the end of the block."""
        ...


def check_result(ran: ProgramRun) -> None:
    """Raises SandboxError if the sandbox's server was lost, because that is not the attempt's
    fault."""
    if ran.server_lost:
        raise SandboxError(f"the sandbox was lost: {ran.error and ran.error.message}")


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
            num_passed = await (work.programs(tests) if tests.pairs else work.functions(tests))

        share = num_passed / tests.number
        value = share if config.partial else float(num_passed == tests.number)
        reason = f"{num_passed} of {tests.number} tests passed"
        return Score(value, success=share == 1, reason=reason)


class _Testing:
    """Runs the tests of one reply's code in one sandbox."""

    def __init__(self, sandbox: Sandbox, code: str, config: CodeTestsConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._code = code.replace("\0", "").encode("utf-8", "replace")
        self._ends = time.monotonic() + config.tests_timeout_s

    def _left_s(self, most: float) -> float:
        return min(most, self._ends - time.monotonic())

    async def programs(self, tests: CodeTests) -> int:
        """The number of inputs with the right output."""
        num_passed = 0
        is_written = False
        for stdin_text, right in tests.pairs:
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

            if not (is_right or self._config.partial):
                break

        return num_passed

    async def functions(self, tests: CodeTests) -> int:
        """The number of calls with the right value, or of assertions that hold."""
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
        await self._sandbox.write_file("runner.py", RUNNER.read_bytes())
        ran = await self._sandbox.execute(
            ["python", "runner.py"],
            stdin=json.dumps(spec).encode(),
            deadline_s=self._left_s(self._config.tests_timeout_s),
        )
        check_result(ran)

        results = await in_thread(_values, ran.stdout, mark)
        if tests.asserts:
            return sum(results.get(index) is True for index in range(tests.number))

        return sum(
            index in results and is_right_value(results[index], right)
            for index, (_, right) in enumerate(tests.calls)
        )


def _values(stdout: str, mark: str) -> dict[int, Any]:
    """Maps the index of each test to the value that the runner wrote."""
    values: dict[int, Any] = {}
    for line in stdout.split("\n"):
        if line.startswith(f"{mark} "):
            try:
                result = msgspec.json.decode(line[len(mark) :])
                values[result["index"]] = result["value"]
            except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
                continue

    return values
