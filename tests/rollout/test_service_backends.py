"""Several services on one store of each kind, and a database server that goes away under them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from servers import unused_name

from agentevo.store.opening import open_store


async def all_ready(url, services, count, meanwhile=None):
    """Runs the services until so many trajectories are ready, and says who wrote what."""
    stop: list[bool] = []
    running = [asyncio.create_task(service.run(lambda: bool(stop))) for service in services]
    if meanwhile is not None:
        await meanwhile()

    async with await open_store(url) as store:
        async with asyncio.timeout(300):
            while (await store.counts())["trajectories/train/ready"] < count:
                for one in running:
                    assert not one.done(), one.exception()
                await asyncio.sleep(0.05)

        stop.append(True)
        await asyncio.gather(*running)
        return await store.counts(), [
            trajectory.trajectory async for trajectory in store.trajectories()
        ]


@pytest.mark.slow
def test_several_services_never_sample_a_group_twice(any_store, make_service, moving_engine):
    async def scenario():
        engines = [moving_engine(version=5, seed=seed, pause_s=0.01) for seed in range(3)]
        stores = [await open_store(any_store) for _ in engines]
        services = [
            make_service(engine, store, {"max_attempts": 4}, worker=f"w{i}")
            for i, (engine, store) in enumerate(zip(engines, stores, strict=True))
        ]
        counts, found = await all_ready(any_store, services, 24)

        for store in stores:
            await store.close()

        asked = Counter(session for engine in engines for session, _ in engine.begun)
        assert asked == dict.fromkeys((t.id for t in found), 2), (
            "each attempt in two turns, by one service"
        )
        assert counts["tasks/completed"] == 12 and len(found) == 24
        assert sum(service.stats()["sampler/groups_written"] for service in services) == 12
        assert sum(bool(engine.begun) for engine in engines) > 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(own_postgresql, make_service, moving_engine):
    url = own_postgresql.url(unused_name())

    async def scenario():
        async def restart():
            await asyncio.sleep(0.5)
            await asyncio.to_thread(own_postgresql.stop, "immediate")
            await asyncio.sleep(2.5)
            await asyncio.to_thread(own_postgresql.start)

        async with await open_store(url, timeout_s=1.5) as store:
            engine = moving_engine(version=30, pause_s=0.05)
            service = make_service(
                engine, store, {"max_attempts": 4, "staleness": 2}, steps=30, retry_s=60.0
            )
            counts, found = await all_ready(url, [service], 120, restart)

        assert counts["tasks/completed"] == 60 and len({t.id for t in found}) == 120
        assert counts["tasks/poison"] == counts["tasks/failed"] == 0

    asyncio.run(scenario())
