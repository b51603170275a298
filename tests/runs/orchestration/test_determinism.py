"""The same recipe twice, on machines whose tools and environments take other times."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from slow import soak

from agentevo.agents import EnvironmentAgent, environment_thread
from agentevo.api.run import train
from agentevo.environments.frozen_lake import FrozenLakeEnvironment
from agentevo.models.compute import linear
from agentevo.runs.folder.run_folder import read_store

pytestmark = [
    pytest.mark.skipif(not linear.available(), reason="another library multiplies here"),
    pytest.mark.slow,
]


def play_slowly(seed, patch):
    """Attempts begin after a while of their own, and calls of the environment take as long as they
    like and are not waited for on the spot."""
    numbers = random.Random(seed)
    step = FrozenLakeEnvironment.step
    run = EnvironmentAgent.run

    def slow_step(self, action):
        time.sleep(numbers.random() * 0.004)
        return step(self, action)

    async def slow_run(self, task, policy):
        await asyncio.sleep(numbers.random() * 0.05)
        return await run(self, task, policy)

    patch.setattr(FrozenLakeEnvironment, "step", slow_step)
    patch.setattr(EnvironmentAgent, "run", slow_run)
    patch.setattr(environment_thread, "GRACE_S", 0.0)


def test_staleness_0_does_not_depend_on_how_long_tools_take(
    tmp_path, small_config, quiet_view, outcome_of, assert_same, monkeypatch
):
    outcomes = []
    for seed in (1, 2):
        config = small_config(tmp_path / f"{seed}", "trainer.steps=2", "trainer.groups_per_step=2")
        with monkeypatch.context() as patch:
            play_slowly(seed, patch)
            train(config, view=quiet_view())
        outcomes.append(outcome_of(config.run_dir))

    assert_same(*outcomes)


@pytest.mark.parametrize(
    "keys",
    [
        ("rollout.sharing=turns", "rollout.staleness=2"),
        *soak(("rollout.sharing=overlap", "rollout.staleness=1")),
    ],
)
def test_wait_draws_the_same_tokens_whatever_comes_when(
    keys, tmp_path, small_config, quiet_view, monkeypatch
):
    """Every token: its id, its log-prob and the version that drew it; and in which order attempts
    enter a step."""
    runs = []
    for seed in (1, 2):
        config = small_config(
            tmp_path / f"{seed}",
            "cold_start.episodes=8",
            "evaluation.every=0",
            "trainer.steps=5",
            "trainer.groups_per_step=2",
            "algorithm.drop_zero_variance=false",
            "rollout.policy=wait",
            *keys,
        )
        with monkeypatch.context() as patch:
            play_slowly(seed, patch)
            train(config, view=quiet_view())

        runs.append((tokens_of(config.run_dir), plans_of(config.run_dir)))

    assert runs[0] == runs[1]

    versions = {
        (step, version)
        for turns, step in runs[0][0].values()
        for turn in turns
        for version in turn[2]
    }
    bound = config.rollout.staleness
    assert versions == {(step, max(0, step - 1 - bound)) for step in range(1, 6)}


def tokens_of(folder):
    """Attempt -> its turns, and the step that it was trained in."""

    async def read(store):
        return {
            stored.trajectory.id: (
                [(t.completion_ids, t.logprobs, t.versions) for t in stored.trajectory.turns],
                stored.trained_step,
            )
            async for stored in store.trajectories(state="committed")
        }

    return read_store(folder, read)


def plans_of(folder):
    async def read(store):
        return [record.record["plan"] for record in await store.steps()]

    return read_store(folder, read)
