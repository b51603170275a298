"""The event loop on which other people's environments run."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agentevo.errors import EnvironmentFailure, OverreachError
from agentevo.runtime import loop_thread
from agentevo.runtime.loop_thread import DedicatedLoop


async def where():
    return asyncio.get_running_loop(), threading.current_thread()


def test_all_share_one_loop_on_a_thread_of_its_own():
    async def both():
        own = DedicatedLoop("world")
        return await own.run(where), await own.run(where), await where()

    first, second, ours = asyncio.run(both())
    assert first == second and first[0] is not ours[0] and first[1] is not ours[1]


def test_what_blocks_holds_up_nobody_else_and_the_next_one_has_another_loop(monkeypatch):
    monkeypatch.setattr(loop_thread, "RESPONSE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(loop_thread, "MAX_ABANDONED", 2)
    free = threading.Event()

    async def blocks():
        free.wait(300)

    async def attempts():
        own = DedicatedLoop("world")
        ticks = 0
        first = await own.run(where)
        hung = asyncio.ensure_future(own.run(blocks))

        for _ in range(5):
            await asyncio.sleep(0.01)
            ticks += 1

        hung.cancel()
        await asyncio.wait([hung], timeout=300)
        assert hung.cancelled() and ticks == 5
        assert (await own.run(where))[0] is not first[0]

        again = asyncio.ensure_future(own.run(blocks))
        await asyncio.sleep(0.05)
        again.cancel()
        await asyncio.wait([again], timeout=300)

        with pytest.raises(EnvironmentFailure, match="blocked its event loop 2 times"):
            await own.run(where)

    try:
        asyncio.run(attempts())
    finally:
        free.set()


def test_an_attempt_that_is_broken_off_is_cancelled_and_the_loop_stays():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def attempts():
        own = DedicatedLoop("world")
        first = await own.run(where)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await own.run(waits)
        assert await own.run(where) == first

    asyncio.run(attempts())
    ends_at = time.monotonic() + 300
    while not ended and time.monotonic() < ends_at:
        time.sleep(0.01)

    assert ended


def test_an_exit_ends_its_attempt_alone():
    async def leaves():
        raise SystemExit(3)

    async def attempts():
        own = DedicatedLoop("world")
        with pytest.raises(OverreachError, match="can't end the process"):
            await own.run(leaves)
        return await own.run(where)

    assert asyncio.run(attempts())
