"""One attempt: whose time counts towards its limit."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec
import numpy as np
import pytest

from agentevo.agents import Outcome, Policy
from agentevo.agents.agent import FunctionAgent
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.rollout.group import POLL_INTERVAL_S, GroupAttempt
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Message, SamplingParams, Task, Trajectory

LIMIT_S = 1.0
PATIENCE_S = 300.0
"""Longest wait for what must happen, on a machine that does other things, too."""
QUESTION = [Message("user", "Go on.")]


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Asks:
    """Asks, waits for its tool, asks again."""

    def __init__(self, tool: asyncio.Event) -> None:
        self._tool = tool

    async def run(self, task, policy):
        reply = await policy.generate(QUESTION)
        await self._tool.wait()
        await policy.generate([*QUESTION, reply.message, *QUESTION])
        return Outcome(reward=1.0, success=True)


@pytest.mark.slow
@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_what_the_engine_sleeps_is_not_the_attempts_time(comes, loaded, chat, monkeypatch):
    """A training step longer than both limits, while one attempt waits for a quick tool, or for its
    first answer, and another hangs."""
    clock = Clock()
    for module in ("rollout.group", "inference.embedded.torch_engine"):
        monkeypatch.setattr(f"agentevo.{module}.time", clock)

    engine = TorchEngine(loaded.model, loaded.tokenizer)

    def attempt(name: str, tool: asyncio.Event) -> GroupAttempt:
        sampling = SamplingParams(max_new_tokens=3)
        conversation = Conversation(
            engine, chat, sampling, name=name, seed=1, context_length=256, timeout_s=LIMIT_S
        )
        return GroupAttempt(
            Asks(tool), Task(id="t"), Policy(conversation), name=name, limit_s=LIMIT_S
        )

    async def work():
        quick_tool = asyncio.Event()
        attempts = [attempt("quick", quick_tool), attempt("hangs", asyncio.Event())]
        if comes == "meanwhile":
            await engine.sleep()

        running = [
            asyncio.create_task(one.run(task_id="t", group_id="g", number=n))
            for n, one in enumerate(attempts)
        ]
        if comes == "before":
            while not all(one.policy.turns for one in attempts):
                await asyncio.sleep(0)
            await engine.sleep()

        await asyncio.sleep(0)
        clock.now += LIMIT_S + 0.5
        quick_tool.set()
        await asyncio.sleep(4 * POLL_INTERVAL_S)
        assert not any(one.done() for one in running)

        await engine.wake()
        quick = await asyncio.wait_for(running[0], PATIENCE_S)
        while not attempts[1].policy.turns:
            await asyncio.sleep(0)
        assert not running[1].done()

        clock.now += LIMIT_S
        return quick, await asyncio.wait_for(running[1], PATIENCE_S)

    (quick,), (hangs,) = run_coroutine(work())
    assert (quick.status, quick.error, len(quick.turns)) == ("completed", None, 2)
    assert (hangs.status, hangs.error) == (
        "failed",
        "the episode took longer than agent.timeout_s=1 s",
    )
    assert hangs.duration_s == 2 * LIMIT_S + 0.5, "its own second, and the engine's"


def played(loaded, chat, scripted_engine, end, files=()) -> Trajectory:
    """An attempt whose agent asks once, keeps files, and then does `end()`."""
    engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, ["left"])

    async def agent(task, policy):
        await policy.generate(QUESTION)
        for file in files:
            policy.keep_files(file)
        return end()

    async def work():
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=256, timeout_s=300
        )
        attempt = GroupAttempt(
            FunctionAgent(agent), Task(id="t"), Policy(conversation), name="a", limit_s=300
        )
        return await attempt.run(task_id="t", group_id="g", number=0)

    (trajectory,) = asyncio.run(work())
    told = msgspec.structs.replace(trajectory, turns=[])
    assert msgspec.json.decode(msgspec.json.encode(told), type=Trajectory) == told
    return trajectory


@pytest.mark.slow
@pytest.mark.parametrize("way", ["returns", "raises"])
def test_a_process_that_the_agent_forks_does_not_go_on_with_the_run(
    way, loaded, chat, scripted_engine
):
    parent = os.getpid()
    children = []

    def end():
        children.append(os.fork())
        if os.getpid() != parent and way == "raises":
            raise ValueError("in the child")
        return Outcome(reward=1.0, success=True)

    assert played(loaded, chat, scripted_engine, end).status == "completed"
    if os.getpid() != parent:
        os._exit(7)  # it came back as a second run

    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == os.EX_SOFTWARE


def test_an_outcome_of_numpy_numbers_is_a_plain_one(loaded, chat, scripted_engine):
    one = np.float32(1)

    def end():
        return Outcome(
            reward=one,
            success=np.bool_(True),
            reward_parts={"a": one},
            turn_rewards={np.int64(0): one},
            metrics={"b": np.int64(2), "c": one},
        )

    trajectory = played(loaded, chat, scripted_engine, end)
    assert (trajectory.status, trajectory.reward, trajectory.success) == ("completed", 1.0, True)
    assert (trajectory.reward_parts, trajectory.turns[0].reward) == ({"a": 1.0}, 1.0)
    assert trajectory.metrics == {"b": 2.0, "c": 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "1"}, "reward is '1': give a number"),
        ({"reward": 1e308}, "reward is 1e+308: numbers go up to 1e+12"),
        ({"reward": 10**400}, "reward is inf"),
        ({"metrics": {"a": None}}, "metrics: 'a' is None: give a number"),
        ({"metrics": None}, "metrics is None: give a mapping"),
        ({"metrics": {1: 2.0}}, "metrics has the name 1: names are texts"),
        ({"metrics": {"a\ud800": 1.0}}, "half of a surrogate pair"),
        ({"metrics": {"a": float("nan")}}, "metrics: 'a' is nan"),
        ({"success": None}, "success is None: give True or False"),
        ({"success": "yes"}, "success is 'yes': give True or False"),
        ({"truncated": "yes"}, "truncated is 'yes': give True or False"),
        ({"turn_rewards": {"0": 1.0}}, "turn_rewards name a turn '0'"),
        ({"turn_rewards": {99: 1.0}}, "turn_rewards name the turn 99, but it took 1"),
        ({"turn_rewards": None}, "turn_rewards is None: give a mapping"),
    ],
)
def test_a_malformed_outcome_fails_its_attempt(loaded, chat, scripted_engine, fields, message):
    trajectory = played(loaded, chat, scripted_engine, lambda: Outcome(**{"reward": 1.0} | fields))
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("failed", 0.0, 1)
    assert message in trajectory.error


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        Unspeakable(),
        ValueError("cut \ud800 text"),
        GeneratorExit(),
        BaseExceptionGroup("several", [SystemExit(1)]),
    ],
)
def test_whatever_an_agent_raises_fails_its_attempt_alone(loaded, chat, scripted_engine, error):
    def end():
        raise error

    trajectory = played(loaded, chat, scripted_engine, end)
    assert trajectory.status == "failed" and type(error).__name__ in trajectory.error


def test_a_failed_attempt_keeps_its_files_too(loaded, chat, scripted_engine):
    def end():
        raise ValueError("no")

    trajectory = played(
        loaded, chat, scripted_engine, end, files=[{"a": b"1"}, {"b/c": b"2", "a": b"3"}]
    )
    assert trajectory.status == "failed" and trajectory.files == {"a": b"3", "b/c": b"2"}


@pytest.mark.parametrize(
    "files",
    [
        {"../a": b""},
        {"a": "text"},
        {"a/": b""},
        {"/a": b""},
        {"\ud800": b""},
        {"a": bytes(2**23 + 1)},
    ],
)
def test_files_that_can_not_be_stored_fail_their_attempt(loaded, chat, scripted_engine, files):
    trajectory = played(loaded, chat, scripted_engine, lambda: 1.0, files=[files])
    assert trajectory.status == "failed" and "keep_files" in trajectory.error
    assert trajectory.files == {}
