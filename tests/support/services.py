"""Sampler services that run during a test, and conditions to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentevo.rollout.service import SamplerService
from agentevo.store.records import StoredTask
from agentevo.store.store import Store

Condition = Callable[[], Awaitable[bool]]


async def until(condition: Condition, within_s: float = 300.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(*services: SamplerService) -> AsyncIterator[list[bool]]:
    """Runs the services; they stop when the block ends or something is appended to the list that it
    is given. A failure of one is raised at the end."""
    stop: list[bool] = []
    running = [asyncio.create_task(service.run(lambda: bool(stop))) for service in services]
    try:
        yield stop
    finally:
        stop.append(True)
        await asyncio.gather(*running)


def num_groups(store: Store, count: int) -> Condition:
    """True once at least so many training groups are written."""

    async def there() -> bool:
        return len({s.group_id for s in await store.summaries(split="train")}) >= count

    return there


def counted(store: Store, key: str, count: int) -> Condition:
    """True once `Store.counts` has this number."""

    async def there() -> bool:
        return (await store.counts())[key] == count

    return there


def num_begun(engine: Any, count: int) -> Condition:
    """True once a MovingEngine has begun at least so many requests."""

    async def there() -> bool:
        return len(engine.begun) >= count

    return there


def num_running(service: SamplerService, count: int) -> Condition:
    """True once the service has so many groups under way."""

    async def there() -> bool:
        return service.stats()["sampler/groups_running"] == count

    return there


def num_poisoned(service: SamplerService, count: int) -> Condition:
    """True once the service has counted so many tasks as poison."""

    async def there() -> bool:
        return service.stats()["sampler/tasks_poisoned"] == count

    return there


async def tasks_of(store: Store) -> list[StoredTask]:
    return [task async for task in store.tasks()]
