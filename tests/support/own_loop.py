"""A program's own loop in this process, for tests."""

from __future__ import annotations

import asyncio

from loop_client import SECTIONS, TASKS, native

import agentevo

__all__ = ["TASKS", "gathered", "loop"]


def loop(folder, work, **sections):
    """Runs `work(model)`."""

    async def opened():
        options = SECTIONS | {"rollout": {"staleness": 9, "policy": "mask"}} | sections
        async with asyncio.timeout(300), agentevo.open_model(folder, **options) as model:
            return await work(model)

    return asyncio.run(opened())


async def gathered(model, *tasks):
    groups = await agentevo.gather(native.group(model, task, size=4) for task in tasks)
    return [group.with_rewards([0.0, 0.2, 0.4, 0.9]) for group in groups]
