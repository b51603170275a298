"""Attempts at a server: requests that come twice, programs that are gone, more than there is room
for."""

from __future__ import annotations

import asyncio

import pytest
from loop_client import SECTIONS, TASKS, native
from loop_server import served

import agentevo
from agentevo.api.loop import attempts
from agentevo.api.loop.records import NewAttempt, UnknownAttemptError

FEW = SECTIONS | {"rollout": {"max_attempts": 2}}


def at_a_server(folder, work):
    """Runs `work(client, model)`."""

    async def opened():
        async with (
            asyncio.timeout(300),
            served(folder) as (client, _, _),
            client.open_model("mine", **FEW) as model,
        ):
            await work(client, model)

    asyncio.run(opened())


def new(number):
    return NewAttempt(task_id="t", group_id="t/train@1", number=number)


@pytest.mark.slow
def test_two_programs_share_the_attempts_that_there_may_be(tmp_path):
    """Neither is refused: they wait for each other. All the room is taken until both have asked."""

    async def work(client, model):
        async with client.open_model("mine") as other:
            held = [await model.connection.open(new(number)) for number in range(2)]
            waiting = [
                asyncio.create_task(
                    agentevo.gather(native.group(each, task, size=3) for task in TASKS)
                )
                for each in (model, other)
            ]
            done, _ = await asyncio.wait(waiting, timeout=0.5)
            assert not done, "there is no room, and nobody is refused"

            await asyncio.gather(*(model.connection.end(one) for one in held))
            made = await asyncio.gather(*waiting)

        statuses = [t.status for groups in made for group in groups for t in group.trajectories]
        assert statuses == ["completed"] * 2 * len(TASKS) * 3

    at_a_server(tmp_path, work)


def test_a_request_that_comes_twice_is_done_once(tmp_path):
    async def work(client, model):
        here = model.connection
        first = new(0)
        opened = await asyncio.gather(*(here.open(first) for _ in range(4)))
        assert len({one.handle for one in opened}) == 1

        second = await here.open(new(1))  # the others have taken no room
        ends = await asyncio.gather(*(here.end(second) for _ in range(4)))
        assert all(end == ends[0] for end in ends)
        assert await here.end(second) == ends[0]

    at_a_server(tmp_path, work)


@pytest.mark.slow
def test_a_program_that_is_gone_is_given_up_though_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "POLL_INTERVAL_S", 0.02)
    given_up = []
    end = attempts.Attempts._ending

    def ending(self, handle):
        given_up.append(handle)
        return end(self, handle)

    async def work(client, model):
        gone = [await model.connection.open(new(number)) for number in range(2)]
        monkeypatch.setattr(attempts.Attempts, "_ending", ending)
        monkeypatch.setattr(attempts, "MARGIN_S", -model.state.attempt_timeout_s)
        while len(given_up) < 2:
            await asyncio.sleep(0.02)

        monkeypatch.undo()

        for one in gone:
            with pytest.raises(UnknownAttemptError):
                await model.connection.settle(one)

        await model.connection.open(new(2))

    at_a_server(tmp_path, work)
