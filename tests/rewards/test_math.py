"""Answers that are compared as mathematics, in processes that may be ended at any time."""

import asyncio
import subprocess
import sys
import threading

import pytest
from slow import soak

from agentevo.errors import MissingExtraError
from agentevo.rewards import make_reward, math_answer, math_worker
from agentevo.rewards.reward import reward_config
from agentevo.rollout.scoring import Scoring
from agentevo.runtime import json_worker
from agentevo.types import Message, Task, Trajectory, Turn

pytest.importorskip("math_verify")


def said(text):
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[-1.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("assistant", text)],
    )
    return Trajectory(id="a", task_id="t", group_id="g", turns=[turn])


def task(answer):
    return Task(id="t", query="?", answer=answer)


def scorer(**options):
    return make_reward(reward_config("math")(name="math", **options))


CASES = [
    ("1/2", r"\frac{2}{4}", True),
    (r"\frac12", "0.5", True),
    ("4", "It is $x = 4$.", True),
    ("4", r"so \boxed{5}", False),
    ("x^2 + 2x + 1", "(x+1)^2", True),
    (r"\{1, 2\}", r"\{2, 1\}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("(1, 2)", "(2, 1)", False),
    ("4", "I don't know", False),
    ("4", "", False),
    ("1000", r"1\,000", True),
    ("0", r"1\,000", False),
    (r"1\,000", "1000", True),
    ("9500", r"\boxed{9{,}500}", True),
    ("1000000", "1 000 000", True),
    ("1000", "1\u202f000", True),
    ("1234567", "1'234'567", True),
    ("3/2", "1 1/2", True),
    ("1", "1 1/2", False),
    ("-3/2", "-1 1/2", True),
    ("1.5", "1\u00bd", True),
    ("-5", "\u20135", True),
    ("38", "\uff13\uff18", True),
    ("5000", "5e3", True),
    ("5000", "5 \u00d7 10\u00b3", True),
    ("x^2", "x\u00b2", True),
    (r"\{1, 2\}", "1,2", True),
    ("18", r"\boxed{\$18}", True),
    (r"\$18", "18.00", True),
    ("10000", r"\$10{,}000", True),
    ("0", r"\$10{,}000", False),
    ("-5", r"-\$5", True),
    ("18", r"$\$18$", True),
    ("18", "\u20ac18", True),
    ("1.5", "1{.}5", True),
    ("1.5", "1{,}5", True),
    ("1000000", "1.000.000", True),
    ("0", "1.000.000", False),
    ("1.000.000", "1000000", True),
    ("1234567.5", "1.234.567,5", True),
    ("31", "0x1F", True),
    ("0", "0x1F", False),
    ("30", "1:30", False),
    ("1500000", "1.5 million", True),
    ("1.5", "1.5 million", False),
    ("1500000", "It is about 1.5 million.", True),
    ("1500000", r"1.5\text{ million}", True),
    ("1500000", "$1.5$ million", True),
    ("2000000000", "$2 billion", True),
    ("500000", "1/2 million", True),
    ("500000", r"\frac{1}{2} million", True),
    ("1500000", "150\u4e07", True),
]


@pytest.mark.parametrize(("right", "stated", "equal"), CASES)
def test_what_is_the_same_as_mathematics(right, stated, equal):
    assert math_worker.answer_to({"right": [right], "stated": stated}) == {"equal": equal}


def test_a_right_answer_that_is_no_mathematics_is_no_wrong_answer():
    answer = math_worker.answer_to({"right": ["nobody knows"], "stated": "4"})
    assert "not mathematics" in answer["problem"]


@pytest.mark.slow
def test_a_reply_is_scored_in_a_process_of_its_own_from_any_thread():
    math = scorer()
    values = []

    def judge():
        async def both():
            right = await math.score(said(r"<answer>\frac{1}{2}</answer>"), task(["3", 0.5]))
            wrong = await math.score(said("<answer>3</answer>"), task("1/2"))
            nothing = await math.score(said("<answer></answer>"), task("1/2"))
            return right.value, wrong.value, nothing.value

        values.append(asyncio.run(both()))

    threads = [threading.Thread(target=judge) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert values == [(1.0, 0.0, 0.0)] * 3


@pytest.mark.slow
def test_what_keeps_sympy_busy_is_a_failed_score_and_the_next_one_is_fine(monkeypatch):
    """In the place of hostile LaTeX, whose time depends on sympy's version, a process that never
    answers."""
    hanging = "import sys, time; print('{}', flush=True); sys.stdin.readline(); time.sleep(600)"
    ended = "print('{}', flush=True)"
    right = "import sys; print('{}', flush=True); sys.stdin.readline(); print('{\"equal\": true}')"
    start = subprocess.Popen

    def score(program, deadline_s=60):
        scoring = Scoring([reward_config("math")(name="math", deadline_s=deadline_s)])

        def started(command, **options):
            return start([sys.executable, "-c", program], **options)

        monkeypatch.setattr(json_worker.subprocess, "Popen", started)
        return asyncio.run(scoring.score([said("1/2")], [False], {}, task=task("0.5")))[0]

    late = score(hanging, 3)
    assert (late.status, late.success) == ("failed", False)
    assert "took longer than 3 s to compare two answers" in late.error

    gone = score(ended)
    assert gone.status == "failed" and "process" in gone.error and "ended" in gone.error

    fine = score(right)
    assert (fine.status, fine.reward) == ("completed", 1.0)


def test_a_process_that_has_ended_between_two_comparisons_is_replaced(monkeypatch):
    once = "import sys; print('{}', flush=True); sys.stdin.readline(); print('{\"equal\": true}')"
    start = subprocess.Popen
    begun = []

    def started(command, **options):
        begun.append(start([sys.executable, "-c", once], **options))
        return begun[-1]

    monkeypatch.setattr(json_worker.subprocess, "Popen", started)
    monkeypatch.setattr(math_answer, "MAX_PROCESSES", 1)

    scoring = Scoring([reward_config("math")(name="math")])
    for number in (1, 2):
        scored = asyncio.run(scoring.score([said("1/2")], [False], {}, task=task("0.5")))[0]
        assert (scored.status, len(begun)) == ("completed", number)
        begun[-1].wait(300)


@pytest.mark.slow
def test_a_process_without_a_request_waits_as_long_as_it_takes():
    program = (
        "import signal, sys; from agentevo.rewards import math_worker\n"
        "signal.alarm = lambda s: print('alarm', s, file=sys.stderr)\n"
        "math_worker.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input='{"right": ["1"], "stated": "2"}\n',
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout.splitlines()[1:] == ['{"equal": false}']

    alarms = [line for line in ended.stderr.splitlines() if line.startswith("alarm")]
    assert alarms == [f"alarm {json_worker.REQUEST_TIMEOUT_S}", "alarm 0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stated",
    [
        "9^{9^{9^{9}}}",
        "x^" * 900 + "x",
        *soak("\\boxed{" * 300, "{" * 1900, "((((" * 400, "\\frac" * 300),
    ],
)
def test_hostile_mathematics_ends(stated):
    scoring = Scoring([reward_config("math")(name="math", place="whole", deadline_s=2.0)])
    scored = asyncio.run(scoring.score([said(stated)], [False], {}, task=task("4")))[0]
    assert scored.status == "failed" or (scored.status, scored.reward) == ("completed", 0.0)


def test_without_the_package_the_line_that_installs_it(monkeypatch):
    def missing(module, extra, needed_by):
        raise MissingExtraError(f"{needed_by}: pip install 'agentevo[{extra}]'")

    monkeypatch.setattr(math_answer, "find_spec", lambda name: None)
    monkeypatch.setattr(math_answer, "load_extra", missing)
    with pytest.raises(Exception, match=r"agentevo\[math\]"):
        scorer()
