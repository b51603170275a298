"""What never answers, and what answers late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from fault_attacks import finish
from fault_checks import check, expected_ids
from fault_processes import Component
from slow import soak

from agentevo.api.run import train
from agentevo.config import RunConfig, build_config
from agentevo.observability import LiveView
from agentevo.types import Message, Task

pytestmark = pytest.mark.slow

Small = Callable[..., RunConfig]
Members = Callable[..., list[Component]]


def test_an_engine_that_answers_late(small: Small, members: Members) -> None:
    """Infrastructure: the group is tried again, and no attempt counts as failed."""
    config = small("trainer.steps=5", "engine.timeout_s=5")
    finish(members(config, "serve", "sample", "learn", before="fault_hooks:late_answers"))
    found = check(config)
    assert found.trained == expected_ids(config)
    assert {trajectory.trajectory.status for trajectory in found.trajectories.values()} == {
        "completed"
    }

    told = [event.error for task in found.tasks.values() for event in task.history]
    assert any("no completion within" in one for one in told)


@pytest.mark.parametrize("staleness", [2, *soak(0)])
def test_an_environment_that_never_answers(staleness: int, small: Small, members: Members) -> None:
    """One environment in eight hangs at its first action: its attempts fail with the reason, all
    others are trained on."""
    config = small(
        "trainer.steps=6",
        "environment.hangs=8",
        "agent.timeout_s=5",
        f"rollout.staleness={staleness}",
    )
    finish(members(config, "train"))
    found = check(config)
    hung = {
        name
        for name, trajectory in found.trajectories.items()
        if trajectory.trajectory.status == "failed"
    }
    assert hung and found.trained.keys() == expected_ids(config).keys() - hung

    for name in hung:
        assert "agent.timeout_s=5 s" in str(found.trajectories[name].trajectory.error)


@pytest.mark.parametrize("staleness", [0, *soak(2)])
def test_an_agent_that_never_answers(staleness: int, small: Small) -> None:
    config = small(
        "trainer.steps=4",
        "agent.timeout_s=5",
        f"rollout.staleness={staleness}",
        "model.tiny.tokenizer=byte",
    )
    tree = config.model_dump(mode="json") | {"environment": None}
    config = build_config(tree, needs_environment=False)
    started = []

    async def agent(task: Task, policy: Any) -> float:
        await policy.generate([Message("user", str(task.query))])
        if int(task.id) % 5 == 0:
            started.append(task.id)
            await asyncio.Event().wait()
        return float(int(task.id) % 3 + time.monotonic() % 1)

    train(
        config,
        agent=agent,
        tasks=[Task(id=str(n), query=f"word {n}") for n in range(12)],
        view=LiveView("test", plain=True),
    )
    found = check(config)
    assert started

    for trajectory in found.trajectories.values():
        hangs = int(trajectory.trajectory.task_id.partition("~")[0]) % 5 == 0
        assert (trajectory.trajectory.status == "failed") == hangs
        assert not hangs or "agent.timeout_s=5 s" in str(trajectory.trajectory.error)
