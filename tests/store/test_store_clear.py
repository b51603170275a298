"""Emptying a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentevo.errors import StoreError
from agentevo.store import open_store
from agentevo.types import Task, Trajectory


def test_clear_takes_away_everything_and_the_store_goes_on(url, make_task, make_trajectory):
    asyncio.run(fill_and_clear(url, make_task, make_trajectory))


async def fill_and_clear(
    url: str, make_task: Callable[..., Task], make_trajectory: Callable[..., Trajectory]
) -> None:
    async with await open_store(url) as store:
        await store.add_tasks([make_task("a"), make_task("b")])
        lease = await store.lease_task("worker", lease_s=30.0)
        assert lease is not None

        await store.write_trajectories(
            [make_trajectory("t1"), make_trajectory("t2")], split="train", step=1, lease=lease
        )
        await store.write_trajectories([make_trajectory("t3")], split="eval", step=0)
        await store.reserve(["t1"], 1)
        await store.commit_step(1, {"metrics": {}})
        other = await store.lease_task("worker", lease_s=30.0)
        assert other is not None
        assert await store.clear() == 2 + 3 + 1
        assert not any((await store.counts()).values())
        assert [trajectory async for trajectory in store.trajectories()] == []
        assert await store.steps() == []

        with pytest.raises(StoreError, match="was the store replaced"):
            await store.renew(other)

        await store.add_tasks([make_task("a")])
        assert (
            await store.write_trajectories(
                [make_trajectory("t1", reward=5.0)], split="train", step=1
            )
            == 1
        )
        assert (await store.trajectory("t1")).reward == 5.0
        assert await store.clear() == 2
        assert await store.clear() == 0
