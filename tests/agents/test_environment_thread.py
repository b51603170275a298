"""Environments on threads: quick ones keep the order of events, slow ones play at the same time,
hung ones are counted."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from agentevo.agents import EnvironmentAgent, Reply, environment_thread
from agentevo.agents.environment_thread import EnvironmentThread, Pace
from agentevo.agents.named_texts import Texts
from agentevo.config import EnvironmentAgentSection
from agentevo.errors import EnvironmentFailure, OverreachError
from agentevo.types import Message, Task

PATIENCE_S = 300.0
"""Longest wait for what must happen, on a machine that does other things, too."""


def num_environments() -> int:
    return sum(thread.name == "environment" for thread in threading.enumerate())


def test_nothing_else_happens_while_a_quick_environment_answers():
    told: list[str] = []

    async def play(name: str) -> None:
        thread = EnvironmentThread(Pace())
        for number in range(3):
            told.append(f"{name} asks")
            told.append(await thread.call(lambda number=number: f"{name} has {number}"))
        await thread.end(lambda: None)

    async def work() -> None:
        await asyncio.gather(play("a"), play("b"))

    asyncio.run(work())
    assert told == [
        line
        for name in "ab"
        for number in range(3)
        for line in (f"{name} asks", f"{name} has {number}")
    ]


def test_slow_environments_of_a_kind_play_at_the_same_time(monkeypatch):
    """Sixteen calls wait for each other: waited for on the spot, they would never end."""
    monkeypatch.setattr(environment_thread, "GRACE_S", PATIENCE_S)
    pace = Pace()
    everybody = threading.Barrier(16)

    async def play() -> None:
        thread = EnvironmentThread(pace)
        await thread.call(lambda: everybody.wait(PATIENCE_S))
        await thread.end(lambda: None)

    async def work() -> None:
        thread = EnvironmentThread(pace)
        for _ in range(4):
            await thread.call(lambda: time.sleep(1.2 * environment_thread.SLOW_S))
        assert pace.grace_s == 0.0
        await asyncio.gather(*(play() for _ in range(16)))
        await thread.end(lambda: None)

    asyncio.run(work())
    for _ in range(100):
        pace.record_duration(0.001)

    assert pace.grace_s == PATIENCE_S


def test_a_few_slow_calls_among_quick_ones_do_not_make_a_kind_slow():
    pace = Pace()
    for number in range(1000):
        pace.record_duration(1.0 if number % 50 == 0 else 0.001)
        assert pace.grace_s > 0.0


def agent_of(make) -> EnvironmentAgent:
    return EnvironmentAgent(EnvironmentAgentSection(format="plain"), make)


def test_an_environment_that_can_not_be_made_leaves_no_thread():
    def broken():
        raise EnvironmentFailure("no map")

    before = num_environments()
    for _ in range(5):
        with pytest.raises(EnvironmentFailure, match="no map"):
            asyncio.run(agent_of(broken).run(Task(id="t"), None))

    ends = time.monotonic() + PATIENCE_S
    while num_environments() > before and time.monotonic() < ends:
        time.sleep(0.01)

    assert num_environments() <= before, "another test's may have ended meanwhile"


def test_an_environment_whose_making_was_given_up_is_closed_when_it_is_made():
    go = threading.Event()
    making = threading.Event()
    closed = threading.Event()

    class Late:
        def __init__(self) -> None:
            making.set()
            go.wait(PATIENCE_S)

        def close(self) -> None:
            closed.set()

    async def work() -> None:
        running = asyncio.create_task(agent_of(Late).run(Task(id="t"), None))
        await asyncio.to_thread(making.wait, PATIENCE_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(work())
    assert not closed.is_set()

    go.set()
    assert closed.wait(PATIENCE_S)


def test_a_process_bears_so_many_hung_environments_and_no_more(monkeypatch):
    monkeypatch.setattr(environment_thread, "MAX_HUNG", 2)
    go = threading.Event()

    async def hang() -> None:
        thread = EnvironmentThread(Pace())
        begun = threading.Event()
        calling = asyncio.create_task(thread.call(lambda: (begun.set(), go.wait(PATIENCE_S))))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await thread.end(lambda: None)

    async def work() -> None:
        await hang()
        await hang()
        with pytest.raises(EnvironmentFailure, match="2 environments of this process hang"):
            EnvironmentThread(Pace())

        go.set()
        async with asyncio.timeout(PATIENCE_S):
            while environment_thread._hung:
                await asyncio.sleep(0.01)

        thread = EnvironmentThread(Pace())
        assert await thread.call(lambda: 3) == 3

        await thread.end(lambda: None)

    asyncio.run(work())


def test_an_environment_that_wants_to_end_the_process_fails_its_call():
    async def work() -> None:
        thread = EnvironmentThread(Pace())
        with pytest.raises(
            OverreachError, match=r"SystemExit\(3\): an environment can't end the process"
        ):
            await asyncio.create_task(thread.call(lambda: sys.exit(3)))
        assert await thread.call(lambda: 4) == 4
        await thread.end(lambda: None)

    asyncio.run(work())


class Stuck:
    """One move and it is won; but it can't be closed before `go`."""

    instructions = "Move."

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def reset(self, *, seed):
        return "here", {}

    def step(self, action):
        return "there", 1.0, True, False, {"valid": True, "effective": True, "success": True}

    def close(self) -> None:
        self._go.wait(2 * PATIENCE_S)


class Mover:
    texts = Texts()

    async def generate(self, messages):
        return Reply("Up", True, 0, Message("assistant", "Up"))


@pytest.mark.slow
def test_an_environment_that_hangs_when_it_is_closed_is_counted_and_what_was_played_stays(
    monkeypatch,
):
    monkeypatch.setattr(environment_thread, "MAX_HUNG", 2)
    monkeypatch.setattr(environment_thread, "CLOSE_S", 0.3)
    go = threading.Event()

    async def work() -> None:
        agent = agent_of(lambda: Stuck(go))
        for hung in (1, 2):
            outcome = await asyncio.wait_for(agent.run(Task(id="t"), Mover()), PATIENCE_S)
            assert (outcome.reward, outcome.success) == (1.0, True)
            assert len(environment_thread._hung) == hung

        with pytest.raises(EnvironmentFailure, match="2 environments of this process hang"):
            await agent.run(Task(id="t"), Mover())

        go.set()
        async with asyncio.timeout(PATIENCE_S):
            while environment_thread._hung:
                await asyncio.sleep(0.01)

        monkeypatch.setattr(environment_thread, "CLOSE_S", PATIENCE_S)
        assert (await agent.run(Task(id="t"), Mover())).success

    asyncio.run(work())


def test_an_environment_that_hangs_in_its_close_when_its_attempt_is_broken_off_is_counted(
    monkeypatch,
):
    go = threading.Event()
    closing = threading.Event()

    def close() -> None:
        closing.set()
        go.wait(2 * PATIENCE_S)

    async def work() -> None:
        thread = EnvironmentThread(Pace())
        ending = asyncio.create_task(thread.end(close))
        await asyncio.to_thread(closing.wait, PATIENCE_S)

        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert environment_thread._hung == {thread}

        go.set()
        async with asyncio.timeout(PATIENCE_S):
            while environment_thread._hung:
                await asyncio.sleep(0.01)

    asyncio.run(work())


def test_an_environment_that_fails_to_close_fails_its_attempt():
    def close() -> None:
        raise EnvironmentFailure("the door is jammed")

    async def work() -> None:
        with pytest.raises(EnvironmentFailure, match="jammed"):
            await EnvironmentThread(Pace()).end(close)

    asyncio.run(work())
    assert not environment_thread._hung


@pytest.mark.parametrize("hangs_in", ["reset", "step"])
def test_a_step_that_hangs_fails_its_attempt_when_its_time_is_over(hangs_in):
    go = threading.Event()

    class Sticky(Stuck):
        def reset(self, *, seed):
            if hangs_in == "reset":
                go.wait(PATIENCE_S)
            return super().reset(seed=seed)

        def step(self, action):
            go.wait(PATIENCE_S)
            return super().step(action)

        def close(self) -> None:
            pass

    async def work() -> None:
        section = EnvironmentAgentSection(format="plain", step_timeout_s=0.01)
        agent = EnvironmentAgent(section, lambda: Sticky(go))
        words = rf"{hangs_in}\(\) did not return in agent.step_timeout_s=0.01 s"
        with pytest.raises(EnvironmentFailure, match=words):
            await agent.run(Task(id="t"), Mover())

        go.set()
        async with asyncio.timeout(PATIENCE_S):
            while environment_thread._hung:
                await asyncio.sleep(0.01)

        patient = EnvironmentAgentSection(format="plain", step_timeout_s=PATIENCE_S)
        outcome = await EnvironmentAgent(patient, lambda: Sticky(go)).run(Task(id="t"), Mover())
        assert outcome.success
        times = outcome.timings
        assert 0 <= times["environment_step_s/mean"] <= times["environment_step_s/max"]

    asyncio.run(work())


def test_a_timeout_that_an_environment_raises_is_its_own():
    async def work() -> None:
        thread = EnvironmentThread(Pace())

        def fail() -> None:
            raise TimeoutError("the browser is slow")

        with pytest.raises(TimeoutError, match="the browser is slow"):
            await thread.call(fail, "step", within_s=PATIENCE_S)
        assert not thread.is_busy
        await thread.end(lambda: None)

    asyncio.run(work())
