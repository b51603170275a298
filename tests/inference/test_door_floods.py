"""Clients that ask for too much, or for what can't be: floods, ids that come again, numbers out of
range. What they can pile up is bounded, and costs nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import msgspec
import pytest
from engine_door import SOON_S, WRONG_SAMPLING, CountingEngine, a_door, last_word

from agentevo.errors import EngineError
from agentevo.inference.serving import server_connection
from agentevo.inference.serving.messages import Generate, Release, WatchRequest
from agentevo.types import SamplingParams


@pytest.mark.slow
def test_a_flood_of_releases_costs_no_task_and_holds_nobody_up(tmp_path):
    """As fast as they come; another client asks for tokens meanwhile."""
    flood(tmp_path, 20_000)


@pytest.mark.soak
def test_a_million_releases_hold_nobody_up(tmp_path, monkeypatch):
    flood(tmp_path, 1_000_000)


def flood(tmp_path, number: int) -> None:
    async def work():
        async with a_door(tmp_path) as door:
            websocket = await door.websocket()
            other = await door.client()
            for first in range(0, number, 4000):
                frame = [Release(session=str(first + one)) for one in range(4000)]
                await websocket.send(msgspec.msgpack.encode(frame))
                begun = time.monotonic()
                await other.generate([1], SamplingParams(), None, SOON_S)
                assert time.monotonic() - begun < SOON_S

            async with asyncio.timeout(300):
                while len(door.engine.released) < min(number, 60_000):
                    await asyncio.sleep(0.01)
            assert door.engine.most_tasks < 50, door.engine.most_tasks

            await websocket.close()
            await other.close()

    asyncio.run(work())


def test_what_an_engine_does_not_forget_piles_up_only_so_far(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server_connection, "MAX_RELEASES", 10)
    monkeypatch.setattr(server_connection, "RELEASE_S", 0.05)

    class Stuck(CountingEngine):
        async def release(self, session):
            self.released.add(session)
            if session == "0":
                raise ZeroDivisionError("no such thing")
            if session == "1":
                await asyncio.sleep(60)

    async def work():
        async with a_door(tmp_path) as door:
            door.engine.__class__ = Stuck
            websocket = await door.websocket()
            frame = [Release(session=str(number)) for number in range(1000)]
            await websocket.send(msgspec.msgpack.encode(frame))

            async with asyncio.timeout(SOON_S):
                while len(door.engine.released) < 10:
                    await asyncio.sleep(0.01)

            await asyncio.sleep(0.05)
            assert len(door.engine.released) == 10 and await door.is_served()

            await websocket.close()

    asyncio.run(work())
    assert "conversation 0 was not released: no such thing" in caplog.text


@pytest.mark.parametrize("finished", [False, True], ids=["running", "answered"])
def test_an_id_is_used_once(finished, tmp_path):
    """A request that is sent again would take the place of the first one, and its answer."""

    async def work():
        async with a_door(tmp_path) as door:
            door.engine.takes_s = 0.0 if finished else 60.0
            websocket = await door.websocket()
            frame = msgspec.msgpack.encode(
                [Generate(id=5, prompt_ids=[1], sampling=SamplingParams(), deadline_s=300.0)]
            )
            await websocket.send(frame)
            await asyncio.sleep(0.1)
            await websocket.send(frame)

            assert await last_word(websocket) == (1008, "the id 5 was used: ids must increase")
            assert door.engine.asked == [1]

    asyncio.run(work())


@pytest.mark.slow
def test_requests_that_run_and_answers_that_nobody_takes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(server_connection, "MAX_RUNNING", 10)
    monkeypatch.setattr(server_connection, "MAX_UNREAD", 1000)
    outboxes = []

    class Seen(server_connection.Outbox):
        def __init__(self):
            super().__init__()
            outboxes.append(self)

    monkeypatch.setattr(server_connection, "Outbox", Seen)

    async def work():
        async with a_door(tmp_path) as door:
            door.engine.takes_s = 60.0
            websocket = await door.websocket()
            websocket.transport.pause_reading()

            def frame(first: int) -> bytes:
                return msgspec.msgpack.encode([
                    Generate(id=first + n, prompt_ids=[1], sampling=SamplingParams(),
                             deadline_s=300.0) for n in range(4000)
                ])  # fmt: skip

            sent = 0
            with contextlib.suppress(TimeoutError):
                for number in range(100):
                    async with asyncio.timeout(5.0):
                        await websocket.send(frame(1 + 4000 * number))
                        sent += 1

            assert sent < 100, "it is not read any more"
            async with asyncio.timeout(SOON_S):
                while len(door.engine.asked) < 10:
                    await asyncio.sleep(0.01)

            assert len(outboxes[0]) <= 1000 + 4000 + 1 and len(door.engine.asked) == 10

            door.engine.takes_s = 0.0
            assert await door.is_served()

            websocket.transport.abort()

    asyncio.run(work())


def test_many_watches_in_a_frame_are_one_answer(tmp_path):
    async def work():
        async with a_door(tmp_path) as door:
            websocket = await door.websocket()
            frame = [WatchRequest(id=number, every_s=60.0) for number in range(1, 4001)]
            await websocket.send(msgspec.msgpack.encode(frame))
            answers = []
            async with asyncio.timeout(SOON_S):
                while not answers or answers[-1]["watch"] < 4000:
                    answers += msgspec.msgpack.decode(await websocket.recv())

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while True:
                        answers += msgspec.msgpack.decode(await websocket.recv())

            assert answers[-1]["watch"] == 4000 and len(answers) <= 4

            await websocket.close()

    asyncio.run(work())


def test_numbers_out_of_range_are_refused_and_the_connection_stays(tmp_path):
    async def work():
        async with a_door(tmp_path) as door:
            client = await door.client()
            for wrong in WRONG_SAMPLING:
                with pytest.raises(EngineError, match=rf"sampling: {next(iter(wrong))}.* must be"):
                    await client.generate([1], SamplingParams(**wrong), None, SOON_S)

            await client.close()
            websocket = await door.websocket()
            right = SamplingParams()
            strange = (math.nan, math.inf, -math.inf)
            frame = [
                *(
                    WatchRequest(id=number, every_s=value)
                    for number, value in enumerate(strange, 1)
                ),
                *(
                    Generate(id=number, prompt_ids=[1], sampling=right, deadline_s=value)
                    for number, value in enumerate(strange, 4)
                ),
            ]
            await websocket.send(msgspec.msgpack.encode(frame))
            answers = []
            async with asyncio.timeout(SOON_S):
                while len(answers) < 3:
                    received = msgspec.msgpack.decode(await websocket.recv())
                    answers += [one for one in received if one["type"] == "failed"]

            assert all("deadline of a request must be" in answer["message"] for answer in answers)

            await websocket.close()
            assert door.engine.asked == [] and await door.is_served()

    asyncio.run(work())
