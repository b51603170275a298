"""How failed attempts are named, counted and shown."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentevo.agents.agent import FunctionAgent
from agentevo.agents.named_texts import Texts
from agentevo.errors import (
    CommandFailedError,
    OverreachError,
    StoreError,
    ToolUnavailableError,
    describe_error,
)
from agentevo.rollout.failures import (
    MAX_KINDS,
    NO_REWARD,
    FirstFailures,
    count_kinds,
    failure_kind,
    summarize_failures,
)
from agentevo.rollout.group import write_group
from agentevo.runtime.daemon_threads import run_in_thread
from agentevo.runtime.tracebacks import name_place, traceback_of
from agentevo.types import Task, Trajectory

LATE = "the episode took longer than agent.timeout_s=300 s"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ValueError: bad: 3", "ValueError"),
        ("SystemExit(3): an agent can't end the process that it runs in", "SystemExit"),
        (LATE, "timeout"),
        (NO_REWARD, "no_reward"),
        ("the reward 'judge' failed: KeyError: 'a'", "scorer_KeyError"),
        ("the reward 'judge' failed: no score within timeout_s=3 s", "scorer_timeout"),
        ("a/? b: odd", "other"),
        ("漢字: odd", "other"),
        (None, "other"),
    ],
)
def test_the_kind_of_a_failure_is_one_word(error, kind):
    assert failure_kind(error) == kind


def test_failures_are_counted_by_kind_and_the_kinds_are_bounded():
    assert count_kinds([LATE, "ValueError: a", "ValueError: b"]) == {"ValueError": 2, "timeout": 1}
    many = [f"Error{number}: a" for number in range(100)] + ["Error0: b"]
    counts = count_kinds(many)
    assert len(counts) <= MAX_KINDS + 1 and sum(counts.values()) == 101 and counts["Error0"] == 2


def test_failures_in_words():
    errors = [LATE] * 58
    assert summarize_failures(errors, 256) == (
        "58 of 256 failed: 58 took longer than agent.timeout_s=300 s"
    )
    words = summarize_failures(["A: 1", "A: 2", "B: 1", "C: 1", "D: 1"], 5)
    assert words == "5 of 5 failed: 2 A: 1, 1 B: 1, 1 C: 1, and 1 other kinds"


def test_the_first_failure_of_each_kind_is_shown_at_once_with_its_traceback():
    def theirs() -> None:
        raise ValueError("bad")

    notes: list[str] = []
    failures = FirstFailures(notes.append)
    try:
        theirs()
    except ValueError as error:
        failures.show("t/greedy@0#0", describe_error(error), traceback_of(error))

    failures.show("t/greedy@0#1", "ValueError: again", "")
    failures.show("t/greedy@0#2", LATE, "")
    assert len(notes) == 2
    assert "t/greedy@0#0 failed: ValueError: bad" in notes[0]
    assert f'File "{Path(__file__)}", line' in notes[0] and "in theirs" in notes[0]
    assert "in theirs" in failures.trace_of("ValueError: a third") and not failures.trace_of("A: a")


def raised(function) -> BaseException:
    """What it raises when agentevo's own code calls it, as an agent is."""

    async def agent(task, policy):
        function()

    with pytest.raises((RuntimeError, KeyError)) as caught:
        asyncio.run(FunctionAgent(agent).run(Task(id="t"), NoPolicy()))
    return caught.value


class NoPolicy:
    """In the place of a policy."""

    agents = ()
    texts = Texts()


def test_a_traceback_shows_the_users_own_places_and_then_what_it_came_of():
    def parses() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no answer") from error

    text = traceback_of(raised(parses))
    first, _, second = text.partition("It came of:")
    assert first.splitlines()[0] == "Traceback (most recent call last):"
    assert first.rstrip().endswith("RuntimeError: no answer")

    files = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    assert set(files[:-1]) == {__file__} and "agentevo/agents" not in text
    assert files[-1].endswith("json/decoder.py"), "where it was raised"
    assert "in parses" in second and second.rstrip().endswith("(char 1)")


def test_each_place_is_shown_once_and_the_users_is_last():
    def looks() -> object:
        return {}["colour"]

    text = traceback_of(raised(looks))
    assert text.count("in looks") == 1 and text.count("Traceback") == 1
    assert text.splitlines()[-1] == "KeyError: 'colour'"


def test_what_ends_a_thread_shows_one_traceback_of_the_users_own():
    def ends() -> None:
        sys.exit(3)

    with pytest.raises(OverreachError) as caught:
        asyncio.run(run_in_thread(ends, "reward"))
    error = caught.value
    below_this_test = error.__traceback__.tb_next
    text = traceback_of(error.with_traceback(below_this_test))
    assert text.count("Traceback") == text.count("in ends") == 1
    assert "concurrent" not in text and text.endswith("SystemExit: 3")


def test_what_the_error_says_itself_has_no_traceback():
    assert traceback_of(raised_on_purpose("the program wrote nothing")) == ""
    text = traceback_of(raised_on_purpose("it ended with 1: Error: a\nTraceback of theirs"))
    assert text == "Traceback of theirs", "the first line is told beside it"


def raised_on_purpose(message: str) -> BaseException:
    """What AgentEvo raises, and no code of a user's."""
    return CommandFailedError(message)


def test_a_server_that_is_away_has_no_traceback():
    def away():
        try:
            json.loads("")
        except ValueError as error:
            raise ToolUnavailableError("nobody answers") from error

    with pytest.raises(ToolUnavailableError) as raised:
        away()

    error = raised.value
    assert "away" in traceback_of(error), "a tool's own code raised it"

    error.__cause__.__traceback__ = error.__cause__.__traceback__.tb_next
    error.__traceback__ = None
    assert error.__cause__.__traceback__ is not None
    assert traceback_of(error) == "", "what is left are Python's own places"


def test_causes_that_go_round_end():
    first = CommandFailedError("a\nb")
    second = ValueError("c")
    first.__cause__ = second
    second.__cause__ = first
    assert 0 < len(traceback_of(first)) < 1000


def attempt(name: str, **more: object) -> Trajectory:
    return Trajectory(id=name, task_id="t", group_id="g", **more)


def test_what_no_store_can_hold_fails_alone():
    async def write(attempts: list[Trajectory], **place: object) -> None:
        calls.append([one.status for one in attempts])
        if any(one.metrics for one in attempts):
            raise StoreError("no")

    def written(attempts: list[Trajectory], write: Any) -> list[Trajectory]:
        store: Any = SimpleNamespace(write_trajectories=write)
        return asyncio.run(write_group(store, attempts, split="train", step=1))

    calls: list[list[str]] = []
    made = [attempt("a"), attempt("b", metrics={"reward_parts/x": 1.0})]
    fine, spoilt = written(made, write)

    assert calls == [["completed", "completed"], ["completed", "failed"]]
    assert fine == made[0] and "can't be stored" in spoilt.error

    async def refuse(attempts: list[Trajectory], **place: object) -> None:
        raise StoreError("the id is taken")

    with pytest.raises(StoreError, match="the id is taken"):
        written([attempt("a")], refuse)


def test_a_place_is_shown_once_and_named_without_its_traceback():
    def wrong() -> None:
        raise ValueError("bad")

    def parses() -> None:
        json.loads("{")

    for function in (wrong, parses):
        with pytest.raises(ValueError, match=r"bad|property name") as caught:
            function()
        text = traceback_of(caught.value)
        lines = [line for line in text.splitlines() if line.startswith("  File ")]
        assert len(lines) == len(set(lines)), text
        place = name_place(text)
        assert place.startswith(f"{__file__}, line ") and place.endswith(f"in {function.__name__}")

    assert name_place("") == name_place("Traceback of theirs") == ""
