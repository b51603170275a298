"""Seeds of environments: one environment is never in two purposes."""

from __future__ import annotations

from itertools import islice

from agentevo.rollout.tasks import environment_seed, environment_tasks, refill_tasks


def test_purposes_never_share_a_seed():
    seeds = {
        purpose: {environment_seed(run, purpose, index) for run in range(5) for index in range(400)}
        for purpose in ("train", "eval", "demonstration")
    }
    assert all(len(found) == 2000 for found in seeds.values()), (
        "other runs and other indices are other environments"
    )
    assert not seeds["train"] & seeds["eval"]
    assert not seeds["train"] & seeds["demonstration"]
    assert not seeds["eval"] & seeds["demonstration"]
    assert all(seed % 4 == 1 for seed in seeds["eval"])


def test_tasks_of_an_environment():
    tasks = environment_tasks("coins", 7, "train", 3, 2)
    assert [task.id for task in tasks] == ["train-3", "train-4"]
    assert [task.seed for task in tasks] == [
        environment_seed(7, "train", 3),
        environment_seed(7, "train", 4),
    ]
    assert {task.environment for task in tasks} == {"coins"}
    assert environment_tasks("coins", 7, "train", 3, 2) == tasks


def test_refills_have_ids_and_seeds_of_their_step():
    tasks = list(islice(refill_tasks("coins", 7, 3), 2))
    assert [task.id for task in tasks] == ["train-3+0", "train-3+1"]
    assert [task.seed for task in tasks] == [
        environment_seed(7, "train", "3+0"),
        environment_seed(7, "train", "3+1"),
    ]
    assert environment_seed(7, "train", "3") != environment_seed(7, "train", 3)
