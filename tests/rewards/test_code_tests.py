"""Code judged by tests in a sandbox: every form of tests that data sets have, and code that would
rather be judged otherwise."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from agentevo.environments.sandbox.sandbox import Failure, ProgramRun
from agentevo.errors import ConfigError, SandboxError, UnknownNameError
from agentevo.rewards.code_tests import (
    CodeTestsConfig,
    CodeTestsReward,
    cases_of,
    code_of,
    is_right_output,
    is_right_value,
)
from agentevo.rollout.scoring import Scoring
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Message, Task, Trajectory, Turn

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
PRINTS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}
ADDS = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


def task_of(tests=None, answer=None, **columns):
    given = columns if tests is None else {"tests": tests, **columns}
    return Task(id="t", query="?", answer=answer, metadata=given)


def said(reply: str, number: int = 0) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("user", "?"), Message("assistant", reply)],
    )
    return Trajectory(id=f"t#{number}", task_id="t", group_id="g", attempt=number, turns=[turn])


def judged(replies, task, **options):
    scoring = Scoring([CodeTestsConfig(name="code_tests", **options)])
    attempts = [said(reply, number) for number, reply in enumerate(replies)]
    return run_coroutine(scoring.score(attempts, [True] * len(attempts), {}, task=task))


def rewards_of(replies, task, **options):
    found = judged(replies, task, **options)
    assert all(one.status == "completed" for one in found), [one.error for one in found]
    return [one.reward for one in found]


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        (task_of(SUMS), PRINTS, PRINTS.replace("+", "-")),
        (task_of(json.dumps(CALLS)), ADDS, ADDS.replace("+", "*")),
        (
            task_of(answer=json.dumps(CALLS)),
            "```\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```",
            ADDS.replace("add", "sub"),
        ),
        (task_of(test_list=ASSERTS), ADDS, ADDS.replace("+", "-")),
        (
            task_of(
                test="def check(candidate):\n    assert candidate(2, 2) == 4", entry_point="add"
            ),
            ADDS,
            ADDS.replace("a + b", "5"),
        ),
        (
            task_of(
                public_test_cases=[{"input": "1\n2", "output": "3", "testtype": "functional"}],
                metadata=json.dumps({"func_name": "add"}),
            ),
            ADDS,
            ADDS.replace("+", "-"),
        ),
    ],
)
def test_every_form_tells_right_from_wrong(task, right, wrong):
    assert rewards_of([right, wrong, "no code here (", ""], task) == [1.0, 0.0, 0.0, 0.0]


def test_a_share_where_it_is_asked_for():
    half = ADDS.replace("a + b", "3")
    assert rewards_of([half], task_of(CALLS), partial=True) == [0.5]
    assert rewards_of([half], task_of(CALLS)) == [0.0]
    once = PRINTS.replace("a + b", "3")
    assert rewards_of([once], task_of(SUMS), partial=True) == [0.5]
    assert rewards_of([once], task_of(SUMS), max_tests=1) == [1.0]


BODY = "```python\n{}\n```"
ATTACKS = [
    "raise SystemExit(0)",
    "import os\nos._exit(0)",
    "while True: pass",
    "def add(a, b):\n    while True: pass",
    "def add(a, b):\n    import sys\n    sys.exit(0)",
    "class Always:\n    __eq__ = lambda *_: True\n\ndef add(a, b):\n    return Always()",
    "def add(a, b):\n    return [0] * 10**9",
    'print(\'{"index": 0, "value": 3}\')\nprint(\'{"index": 1, "value": 7}\')',
    "import json\njson.dumps = lambda *_: '3'",
    "def add(a, b):\n    return 'x' * 10**7",
    "import os\nwhile True:\n    os.fork()",
]


@pytest.mark.slow
def test_code_that_wants_to_be_judged_otherwise_gets_nothing():
    replies = [BODY.format(attack) for attack in ATTACKS]
    options = {"test_timeout_s": 1.0, "sandbox": {"memory_mib": 256}}
    found = rewards_of(replies, task_of(CALLS), partial=True, **options)
    assert found == [0.0] * len(ATTACKS)
    assert rewards_of([BODY.format("raise SystemExit(0)"), ADDS], task_of(test_list=ASSERTS)) == [
        0.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("task", "code", "reason"),
    [
        (task_of(CALLS), "def add(a, b):\n    return a + c", "test 1: NameError: name 'c' is not"),
        (task_of(CALLS), "import nothing", "code: ModuleNotFoundError: No module named 'nothing'"),
        (task_of(CALLS), "def add(a, b:", "code: SyntaxError: '(' was never closed"),
        (task_of(CALLS), "def add(a, b):\n    return a - b", ""),
        (task_of(CALLS), "def add(a, b):\n    return {1}", "test 1: TypeError: Object of type set"),
        (task_of(CALLS), "import os\nos._exit(3)", "exit code 3"),
        (task_of(test_list=ASSERTS), "def add(a, b):\n    return 3", "test 2: AssertionError"),
        (task_of(SUMS), "print(1 / 0)", "test 1: ZeroDivisionError: division by zero"),
        (
            task_of(CALLS),
            "class Odd(Exception):\n    def __str__(self):\n        raise self\nraise Odd",
            "code: an exception that can't be shown",
        ),
    ],
)
def test_a_reason_says_what_the_code_raised(task, code, reason, reasons):
    assert rewards_of([BODY.format(code)], task) == [0.0]
    (text,) = reasons
    assert f"; {reason}" in text if reason else ";" not in text


@pytest.fixture
def reasons(monkeypatch):
    """The reasons of all scores, in their order."""
    texts = []
    score = CodeTestsReward.score

    async def score_and_note(self, trajectory, task, sandboxes):
        result = await score(self, trajectory, task, sandboxes)
        texts.append(result.reason)
        return result

    monkeypatch.setattr(CodeTestsReward, "score", score_and_note)
    return texts


@pytest.mark.parametrize("setup", ["import nothing", "def (", "raise SystemExit"])
def test_a_setup_that_raises_is_a_failed_score_and_no_zero(setup):
    task = task_of(test_list=ASSERTS, test_setup_code=setup)
    (attempt,) = judged([ADDS], task)
    assert (attempt.status, attempt.reward) == ("failed", 0.0)
    assert "the tests of the task 't' can't run: its test_setup_code raised" in attempt.error


def test_code_can_not_say_that_the_setup_raised():
    forged = (
        "import sys\nframe = sys._getframe()\n"
        "while 'write' not in frame.f_locals: frame = frame.f_back\n"
        'frame.f_locals["write"](\'{"failed": "setup", "error": "x"}\')'
    )
    assert rewards_of([BODY.format(forged)], task_of(CALLS)) == [0.0]


def test_a_program_meets_a_fresh_interpreter_and_no_right_answer():
    own = "[name for name in os.listdir('.') if name[0] != '.']"
    looks = f"import os\nprint({own}, 'kept' in globals())\nkept = 1"
    right = "['solution.py'] False"
    tests = {"inputs": ["a", "b"], "outputs": [right, right]}
    assert rewards_of([BODY.format(looks)], task_of(tests)) == [1.0]


def test_a_task_without_tests_is_a_failed_score_and_no_zero():
    for task, why in (
        (task_of(), "has no tests"),
        (task_of({"inputs": ["1"], "outputs": []}), "1 inputs and 0 outputs"),
        (task_of({"inputs": [], "outputs": []}), "are empty"),
        (task_of(7), "tests are int"),
    ):
        (found,) = judged([ADDS], task)
        assert (found.status, found.reward) == ("failed", 0.0)
        assert why in found.error


def test_a_wrong_sandbox_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"rewards: code_tests\.sandbox\.memory_mib"):
        Scoring([CodeTestsConfig(name="code_tests", sandbox={"memory_mib": 1})])
    with pytest.raises(UnknownNameError, match="no sandbox is called 'bubblewrapp': did you mean"):
        judged([ADDS], task_of(CALLS), sandbox={"type": "bubblewrapp"})
    (found,) = judged([ADDS], task_of(CALLS), sandbox={"type": "remote", "url": "http://[::1]:1"})
    assert found.status == "failed", "where no sandbox opens, nobody knows"


def test_outputs_are_compared_as_judges_of_programs_do():
    assert is_right_output("1  2 \n3\n\n", "1 2\n3")
    assert is_right_output("0.3333333333", "0.33333333")
    assert not is_right_output("12", "1 2") and not is_right_output("1\n2", "1 2")
    assert not is_right_output("1e400.", "inf.") and not is_right_output("", "1")
    assert is_right_value([[1, 2.0000000001]], [[1, 2]]) and not is_right_value(True, 1)
    assert not is_right_value({"a": 1}, {"b": 1}) and not is_right_value("1", 1)


@pytest.mark.slow
def test_code_is_the_last_block_of_python():
    assert code_of("```python\na\n```\n```python\nb\n```\n```sh\nls\n```").strip() == "b"
    assert code_of("x = 1") == "x = 1"
    assert code_of("```py\nx = 1").strip() == "x = 1", "cut off by the limit of tokens"
    assert code_of("```" * 1_000_001) == "", "in time that grows with the text"


def test_setup_runs_before_the_code():
    tests = cases_of(task_of(test_list=["assert f() == 1"], test_setup_code="ONE = 1"), None, 10)
    assert tests.setup == "ONE = 1"
    task = task_of(test_list=["assert f() == 1"], test_setup_code="ONE = 1")
    assert rewards_of(["```py\ndef f():\n    return ONE\n```"], task) == [1.0]


class Lost:
    """Sandboxes of a server that goes while the code runs."""

    @asynccontextmanager
    async def open(self):
        yield self

    async def write_file(self, path, content):
        pass

    async def execute(self, argv, **limits):
        gone = Failure("SandboxDied", "the connection ended")
        return ProgramRun("", "", None, gone, (), 0.1, files_lost=True, server_lost=True)


@pytest.mark.parametrize("tests", [SUMS, CALLS, ASSERTS])
def test_a_server_that_is_lost_is_no_failed_test(tests):
    scorer = CodeTestsReward(CodeTestsConfig(name="code_tests"))
    with pytest.raises(SandboxError, match="the connection ended"):
        run_coroutine(scorer.score(said(ADDS), task_of(tests), Lost()))
