"""Sampling beside training in one process: every policy, both ways of sharing; what the store says
afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from slow import soak

from agentevo.agents import EnvironmentAgent
from agentevo.api.run import Run, train
from agentevo.errors import ConfigError, EngineError, TrainingError
from agentevo.observability.metrics import read_metrics
from agentevo.rollout.tasks import environment_tasks
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.orchestration.players import make_environment
from agentevo.training.trainer import Trainer

PLAIN = (
    "cold_start.episodes=8",
    "evaluation.every=0",
    "trainer.groups_per_step=2",
    "algorithm.drop_zero_variance=false",
)
WEIGHED = ("algorithm.importance=token_tis", "algorithm.old_logprobs=recomputed")


def trained_on(folder):
    """step -> [(trajectory id, versions of its tokens)], from the store alone."""

    async def read(store):
        found = {}
        async for trajectory in store.trajectories(state="committed"):
            versions = [
                version for turn in trajectory.trajectory.turns for version in turn.versions
            ]
            found.setdefault(trajectory.trained_step, []).append(
                (trajectory.trajectory.id, versions)
            )
        return found

    return read_store(folder, read)


@pytest.mark.parametrize(
    ("policy", "sharing", "in_flight"),
    [
        pytest.param("wait", "overlap", "finish", marks=pytest.mark.slow),
        pytest.param("wait", "turns", "continue", marks=pytest.mark.soak),
        pytest.param("mask", "turns", "continue", marks=pytest.mark.slow),
        pytest.param("cancel", "overlap", "continue", marks=pytest.mark.soak),
        pytest.param("correct", "turns", "finish", marks=pytest.mark.slow),
    ],
)
def test_every_policy_keeps_the_bound(
    policy, sharing, in_flight, tmp_path, small_config, quiet_view
):
    keys = [
        f"rollout.policy={policy}",
        f"rollout.sharing={sharing}",
        f"rollout.in_flight={in_flight}",
        "rollout.staleness=1",
    ]
    config = small_config(
        tmp_path / "run", *PLAIN, *keys, *(WEIGHED if policy == "correct" else ())
    )
    run = train(config, view=quiet_view())
    assert run.audit().violations == []

    steps = trained_on(config.run_dir)
    assert sorted(steps) == list(range(1, config.trainer.steps + 1))

    names = Counter(name for found in steps.values() for name, _ in found)
    assert set(names.values()) == {1}

    ages = {
        step - 1 - version
        for step, found in steps.items()
        for _, versions in found
        for version in versions
    }
    assert max(ages) <= 1 or policy in ("mask", "correct"), "those take tokens out, not attempts"

    rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if "staleness/max" in row]
    assert len(rows) == config.trainer.steps
    assert max(row["staleness/max"] for row in rows) == 1, "the sampler was ahead of the trainer"

    if policy == "wait":
        of_its_own = {
            int(name.rpartition("@")[2].partition("#")[0]) == step
            for step, found in steps.items()
            for name, _ in found
        }
        assert of_its_own == {True}


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path, small_config, quiet_view):
    keys = (*PLAIN, "rollout.staleness=2", "checkpoint.every=3")
    with pytest.raises(KeyboardInterrupt):
        train(small_config(tmp_path / "run", *keys), view=quiet_view(step=1))

    before = trained_on(tmp_path / "run")
    run = train(small_config(tmp_path / "run", *keys), resume=True, view=quiet_view())
    assert run.audit().violations == []

    after = trained_on(tmp_path / "run")
    assert before.items() <= after.items(), "what was committed stays"

    names = {name for found in after.values() for name, _ in found}
    whole = train(small_config(tmp_path / "whole", *keys), view=quiet_view())
    assert names == {name for found in trained_on(whole.dir).values() for name, _ in found}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", *soak("mask")])
def test_a_step_that_was_reserved_gets_the_same_attempts_again(
    policy, tmp_path, small_config, quiet_view
):
    """Its weights may have served before the kill: version 2 must mean the same afterwards."""
    config = small_config(
        tmp_path / "run",
        *PLAIN,
        "rollout.staleness=1",
        f"rollout.policy={policy}",
        "trainer.steps=3",
    )

    class PowerCut(type(quiet_view())):
        def phase(self, name, detail=""):
            if (name, detail) == ("training", "step 2"):
                raise RuntimeError("power cut")
            super().phase(name, detail)

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, view=PowerCut())

    async def reserved(store):
        return [
            trajectory.trajectory.id
            async for trajectory in store.trajectories(trained_step=2, state="reserved")
        ]

    before = read_store(config.run_dir, reserved)
    assert len(before) > 1

    run = train(config, resume=True, view=quiet_view())
    assert [name for name, _ in trained_on(config.run_dir)[2]] == before
    assert run.audit().violations == []


@pytest.mark.slow
def test_an_agent_function_and_given_tasks_of_several_rounds(tmp_path, small_config, quiet_view):
    """Tools are waited for while the trainer computes."""
    config = small_config(
        tmp_path / "run", *PLAIN, "rollout.staleness=1", "rollout.policy=mask", "trainer.steps=4"
    )

    async def slow(task, policy):
        outcome = await EnvironmentAgent(config.agent, lambda: make_environment(config)).run(
            task, policy
        )
        await asyncio.sleep(0.05)
        return outcome

    groups = config.trainer.groups_per_step
    tasks = environment_tasks("frozen_lake", 1, "train", 0, 2 * groups + 3)
    run = train(config, agent=slow, tasks=tasks, view=quiet_view())
    assert run.summary["steps"] == 4
    assert run.audit().violations == []


@pytest.mark.slow
def test_a_trainer_does_not_wait_for_ever_for_attempts_that_all_fail(
    tmp_path, small_config, quiet_view, monkeypatch
):
    config = small_config(tmp_path / "run", *PLAIN, "rollout.staleness=1", "rollout.policy=mask")
    monkeypatch.setattr("agentevo.runs.orchestration.rollout_sources.POLL_INTERVAL_S", 0.2)

    async def broken(task, policy):
        if "/train@" in policy.name:
            raise RuntimeError("no such tool")
        return 0.0

    tasks = environment_tasks("frozen_lake", 1, "train", 0, 20)
    with pytest.raises(
        TrainingError,
        match=r"attempts have all failed, the newest with: RuntimeError: no such tool",
    ):
        train(config, agent=broken, tasks=tasks, view=quiet_view())


@pytest.mark.slow
def test_a_training_step_longer_than_every_deadline_costs_no_attempt(
    tmp_path, small_config, quiet_view, monkeypatch
):
    """The engine sleeps meanwhile, and nobody whom it keeps waiting is late for that."""
    limits = ("engine.timeout_s=8", "agent.timeout_s=8")
    config = small_config(
        tmp_path / "run",
        *PLAIN,
        *limits,
        "rollout.staleness=1",
        "rollout.policy=mask",
        "trainer.steps=2",
    )
    step = Trainer.step

    def slow(*arguments):
        time.sleep(9.0)
        return step(*arguments)

    monkeypatch.setattr(Trainer, "step", slow)
    run = train(config, view=quiet_view())
    assert {trajectory.status for trajectory in run.trajectories()} == {"completed"}

    rows = [
        row
        for row in read_metrics(config.run_dir / "metrics.jsonl")
        if "sampler/tasks_retried" in row
    ]
    assert [row["sampler/tasks_retried"] for row in rows] == [0, 0]


def test_what_cannot_be_apart_is_refused(tmp_path, small_config, quiet_view):
    for keys, message in [
        (("rollout.staleness=1", "profile=true"), "profile needs one process"),
        (("rollout.policy=correct",), "set algorithm.importance=token_tis"),
        (
            ("rollout.staleness=1", "algorithm.dynamic_sampling=3"),
            "rollout.policy=mask, or algorithm.dynamic_sampling=1",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            small_config(tmp_path / "run", *keys)

    apart = small_config(tmp_path / "run", "rollout.samplers=1")

    async def played(task, policy):
        return 0.0

    with pytest.raises(ConfigError, match=r"live in this process: set rollout\.samplers=0"):
        train(
            apart,
            agent=played,
            tasks=environment_tasks("frozen_lake", 1, "train", 0, 9),
            view=quiet_view(),
        )

    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_sampler_that_breaks_ends_the_run(tmp_path, small_config, quiet_view, monkeypatch):
    config = small_config(tmp_path / "run", *PLAIN, "rollout.staleness=1")

    async def broken(self, stop):
        raise EngineError("the sampler's own defect")

    monkeypatch.setattr("agentevo.rollout.service.SamplerService.run", broken)
    with pytest.raises(EngineError, match="own defect"):
        train(config, view=quiet_view())

    assert Run(config).summary == {}
