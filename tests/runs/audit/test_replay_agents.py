"""Attempts of agent functions are replayed with the agent, or token by token without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from byte_policy import byte_policy

from agentevo.api.run import Run, train
from agentevo.config import RunConfig, build_config
from agentevo.types import Message, Task


@pytest.mark.slow
def test_an_agent_function_is_given_again_or_only_the_tokens_are_drawn(tmp_path, quiet_view):
    async def agent(task: Task, policy: Any) -> float:
        reply = await policy.generate([Message("user", task.query or "")])
        return len(reply.text) / 10

    config = function_config(
        tmp_path / "run",
        sampling={"max_new_tokens": 6, "stop": ["a"]},
        trainer={"steps": 1, "groups_per_step": 1, "group_size": 2},
    )
    done = train(config, agent=agent, tasks=TASKS, view=quiet_view())
    names = [t.id for t in done.trajectories(split="train")]
    assert all(done.replay(name).same and done.replay(name).played for name in names)

    alone = Run(config).replay(names[0])
    assert alone.same and not alone.played and alone.tokens > 0

    async def other(task: Task, policy: Any) -> float:
        await policy.generate([Message("user", "something else")])
        return 0.0

    found = Run(config, agent=other, tasks=TASKS).replay(names[0])
    assert found.difference is not None and found.difference.kind == "prompt"


@pytest.mark.slow
def test_turns_with_sampling_of_their_own_are_drawn_again_and_not_trained(tmp_path, quiet_view):
    """A greedy turn and a filtered one in a training attempt: replayed exactly, context in the
    loss."""

    async def agent(task: Task, policy: Any) -> float:
        messages = [Message("user", task.query or "")]
        draft = await policy.generate(messages, sampling={"temperature": 0})
        best, other = await policy.generate(messages, n=2, sampling={"top_k": 3, "seed": 7})
        messages += [best.message, Message("user", draft.text)]
        reply = await policy.generate(messages, sampling={"seed": 7})
        assert {draft.turn, other.turn, reply.turn} == {0, 2, 3}
        return float(policy.name[-1]) / 2  # the attempt's number: the seeds make them alike

    config = function_config(
        tmp_path / "run",
        model=byte_policy(context_length=128),
        trainer={"steps": 2, "groups_per_step": 1, "group_size": 3},
    )
    done = train(config, agent=agent, tasks=TASKS, view=quiet_view())
    attempts = done.trajectories(split="train")
    assert len(attempts) == 6

    for trajectory in attempts:
        assert [turn.parent for turn in trajectory.turns] == [None, None, None, 1]
        assert [turn.overrides is None for turn in trajectory.turns] == [False] * 3 + [True]
        replay = done.replay(trajectory.id)
        assert replay.same and replay.played, replay.difference

    assert done.summary["tokens"]["trained"] == sum(t.num_trainable_tokens() for t in attempts)


def function_config(folder: Path, **sections: Any) -> RunConfig:
    tree = {
        "model": byte_policy(context_length=64),
        "sampling": {"max_new_tokens": 6},
        "trainer": {"steps": 0, "groups_per_step": 1, "group_size": 2},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "checkpoint": {"every": 1, "keep_last": 9},
        "tracking": {"tensorboard": False, "report": False},
    }
    return build_config(tree | sections, [f"run.dir={folder}"], needs_environment=False)


TASKS = [Task(id=f"t{n}", query="x" * n) for n in range(1, 5)]


async def answers(task: Task, policy: Any) -> float:
    await policy.generate([Message("user", task.query or "")])
    return 1.0


async def hangs(task: Task, policy: Any) -> float:
    """In the first attempt of a group: a run in which nothing succeeds would end."""
    await answers(task, policy)
    if policy.name.endswith("#0"):
        await asyncio.Event().wait()
    return 1.0


@pytest.mark.slow
def test_an_agent_that_hangs_is_waited_for_as_long_as_in_the_run(tmp_path, quiet_view):
    """Five seconds are enough for the one request before it hangs, on a busy machine too."""
    two = {"tasks": 1, "every": 0, "samples": 2}
    config = function_config(tmp_path / "hung", agent={"timeout_s": 5.0}, evaluation=two)
    done = train(config, agent=hangs, tasks=TASKS, view=quiet_view())
    (name,) = [
        t.id
        for t in done.trajectories()
        if t.error == "the episode took longer than agent.timeout_s=5 s"
    ][:1]
    found = done.replay(name)
    assert (found.same, found.played, found.turns, found.replayed_reward) == (True, True, 1, None)

    config = function_config(tmp_path / "quick", evaluation=two)
    done = train(config, agent=answers, tasks=TASKS, view=quiet_view())
    name = next(t.id for t in done.trajectories() if t.id.endswith("#0"))
    assert done.replay(name).same

    config = function_config(tmp_path / "quick", agent={"timeout_s": 5.0}, evaluation=two)
    found = Run(config, agent=hangs, tasks=TASKS).replay(name)
    assert found.difference is not None and found.difference.kind == "end"
    assert (
        found.difference.what
        == "the agent failed: the episode took longer than agent.timeout_s=5 s"
    )


@pytest.mark.slow
def test_tasks_of_a_later_round_are_played_as_the_agent_knew_them(tmp_path, quiet_view):
    """Three tasks to train on, one a step: the fourth step's is called ID~1 in the store."""
    rollout = {"staleness": 1}
    config = function_config(
        tmp_path / "run",
        rollout=rollout,
        trainer={"steps": 5, "groups_per_step": 1, "group_size": 2},
    )

    async def agent(task: Task, policy: Any) -> float:
        assert task in TASKS
        reply = await policy.generate([Message("user", task.query or "")])
        return len(reply.text) / 10

    done = train(config, agent=agent, tasks=TASKS, view=quiet_view())
    later = [t for t in done.trajectories(split="train") if "~1" in t.task_id]
    assert later and all(t.status == "completed" for t in later)

    for trajectory in later:
        found = done.replay(trajectory.id)
        assert (found.same, found.played, found.replayed_reward) == (
            True,
            True,
            trajectory.reward,
        ), found.line()
