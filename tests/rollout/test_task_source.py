"""Tasks as samplers queue them: every one known by its id, in every process alike."""

from __future__ import annotations

import pytest
import torch

from agentevo.config import build_config
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.errors import ConfigError
from agentevo.rollout.given_tasks import task_of
from agentevo.rollout.task_source import TaskSource, permutation
from agentevo.rollout.tasks import seed_of_task
from agentevo.types import QUEUED_FOR_STEP, Task


def source(given: list[Task] | None, groups: int = 2) -> TaskSource:
    tree = {"trainer": {"groups_per_step": groups}, "evaluation": {"tasks": 1}}
    return TaskSource(
        build_config(
            tree | ({} if given else {"environment": {"type": "coins"}}),
            needs_environment=given is None,
        ),
        given,
    )


def test_tasks_of_an_environment_say_for_which_step_they_are():
    tasks = source(None)
    queued = [task for step in (1, 2, 3) for task in tasks.tasks_to_queue(step)]
    assert [(task.id, task.metadata) for task in queued] == [
        (f"train-{i}", {QUEUED_FOR_STEP: 1 + i // 2}) for i in range(6)
    ]
    assert [tasks.as_agent_task(task) for task in queued] == [
        task for step in (1, 2, 3) for task in tasks.train(step)
    ]


def test_training_returns_to_a_number_of_tasks_of_an_environment():
    plain = source(None)
    tree = {
        "environment": {"type": "coins"},
        "tasks": {"from_environment": 4},
        "trainer": {"groups_per_step": 2},
        "evaluation": {"tasks": 1},
    }
    tasks = TaskSource(build_config(tree), None)
    rounds = [[*tasks.train(step), *tasks.train(step + 1)] for step in (1, 3, 5)]
    first = sorted(plain.train(1) + plain.train(2), key=lambda task: task.id)
    assert all(sorted(played, key=lambda task: task.id) == first for played in rounds)
    assert tasks.held_out() == plain.held_out()
    assert tasks.given() == []

    queued = tasks.tasks_to_queue(3)
    assert [task.id for task in queued] == [f"{task.id}~1" for task in tasks.train(3)]
    assert [tasks.as_agent_task(task) for task in queued] == tasks.train(3)
    assert [tasks.given_id(task.id) for task in queued] == [task.id for task in tasks.train(3)]
    assert [seed_of_task(0, task.id) for task in queued] == [task.seed for task in queued]

    for changes, words in (
        ({"environment": None, "agent": {"type": "single_turn"}}, "this recipe has none"),
        ({"tasks": {"from_environment": 4, "train": "a.jsonl"}}, "both give tasks"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_config(tree | changes, needs_environment=False)


def test_given_tasks_get_an_id_for_every_round():
    given = [
        Task(id=f"t{i}", query=f"q{i}", metadata={"step": "theirs", "level": i}) for i in range(6)
    ]
    tasks = source(given)  # five to train on: two steps a round, one task waits
    queued = {step: tasks.tasks_to_queue(step) for step in range(1, 7)}
    names = [task.id for step in queued for task in queued[step]]
    assert len(set(names)) == len(names) == 12, "no two are the same task of the store"

    for step, found in queued.items():
        round_ = (step - 1) // 2
        assert [task.id for task in found] == [
            t.id + (f"~{round_}" if round_ else "") for t in tasks.train(step)
        ]
        assert all(
            task.metadata == {QUEUED_FOR_STEP: step, "step": "theirs", "level": int(task.query[1:])}
            for task in found
        ), "what a row has under `step` is in the store as well"
        assert [tasks.as_agent_task(task) for task in found] == tasks.train(step), (
            "the agent gets what it was given"
        )


def test_the_key_of_the_queue_is_refused_in_given_tasks():
    tasks = [Task(id="a", metadata={QUEUED_FOR_STEP: 1}), Task(id="b")]
    with pytest.raises(ConfigError, match="'a' has 'queued_for_step' in its metadata"):
        source(tasks)
    with pytest.raises(RowError, match="the key queued_for_step is reserved"):
        task_of({"query": "q", QUEUED_FOR_STEP: 1}, TaskFields())


def test_ids_that_repetitions_would_have_are_refused():
    with pytest.raises(ConfigError, match="the id 'a~1' is reserved for a repetition of 'a'"):
        source([Task(id="a"), Task(id="b"), Task(id="a~1")])
    source([Task(id="a"), Task(id="b~1"), Task(id="a~x")])


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 + 5, 2**62 + 3])
def test_orders_are_those_of_torch_which_need_not_be_there(seed):
    for size in (0, 1, 2, 9, 500):
        generator = torch.Generator().manual_seed(seed)
        assert permutation(size, seed) == torch.randperm(size, generator=generator).tolist()
