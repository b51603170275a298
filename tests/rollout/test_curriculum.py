"""A curriculum: tasks at the edge of what is solved come more often, from committed records alone;
a run that was broken off chooses as the one that was not."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.config.tasks import Curriculum
from agentevo.errors import ConfigError
from agentevo.observability.metrics import read_metrics
from agentevo.rewards import reward
from agentevo.rollout.curriculum import TaskCurriculum, divide_attempts
from agentevo.rollout.task_source import TaskSource
from agentevo.types import Task


def curriculum(tasks=20, *, groups=2, group_size=4, lag=0, seed=0, **section):
    chosen = [Task(id=f"t{n}") for n in range(tasks)] if isinstance(tasks, int) else tasks
    return TaskCurriculum(
        Curriculum(**section), chosen, seed, groups, group_size=group_size, lag=lag
    )


def test_a_task_that_half_of_the_attempts_solve_comes_most_often():
    made = curriculum(3, groups=1, retire_after=0)
    made.note_step(1, {"t0": [4, 8], "t1": [0, 8], "t2": [8, 8]})
    for step in range(2, 401):
        made.note_step(step, {})

    counts = Counter(made.of_step(step)[0].id for step in range(2, 401))
    # weights 1, 0.36 and 0.36
    assert counts["t0"] > 1.5 * counts["t1"]
    assert min(counts["t1"], counts["t2"]) > 40


def test_a_solved_task_is_retired_and_makes_way_for_its_harder_variant():
    tasks = [
        Task(id="easy"),
        Task(id="other"),
        Task(id="hard", metadata={"variant_of": "easy"}),
    ]
    made = curriculum(tasks, groups=2, retire_after=2)
    assert {task.id for task in made.of_step(1)} == {"easy", "other"}

    made.note_step(1, {"easy~1": [4, 4], "other~1": [0, 4]})
    assert made.metrics(2)["curriculum/locked"] == 1

    made.note_step(2, {"easy~2": [4, 4], "other~2": [0, 4]})
    assert {task.id for task in made.of_step(3)} == {"hard", "other"}
    assert made.metrics(3)["curriculum/retired"] == 1

    # one failure brings it back
    made.note_step(3, {"easy~3": [3, 4]})
    assert made.metrics(4)["curriculum/retired"] == 0


def test_a_step_knows_no_more_than_what_its_samplers_can_know():
    ahead = curriculum(lag=2)
    behind = curriculum(lag=2)

    results = {step: {f"t{step % 20}": [step % 3, 4]} for step in range(1, 12)}
    for step in range(1, 12):
        ahead.note_step(step, results[step])

    chosen = {}
    for step in range(1, 12):
        assert behind.is_known(step)
        chosen[step] = behind.of_step(step)  # before steps step - 2 .. are committed
        if step >= 3:
            behind.note_step(step - 2, results[step - 2])

    assert chosen == {step: ahead.of_step(step) for step in range(1, 12)}
    with pytest.raises(ValueError, match="not decided"):
        behind.of_step(13)


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(4, 8),
    st.integers(8, 20),
)
def test_attempts_are_divided_within_their_bounds_and_none_is_lost(shares, least, mean, most):
    numbers = divide_attempts(shares, mean * len(shares), least, most)
    assert sum(numbers) == mean * len(shares)
    assert least <= min(numbers) and max(numbers) <= most
    ranked = sorted(zip(shares, numbers, strict=True))
    assert all(number <= other for (_, number), (_, other) in pairwise(ranked))


def test_hard_tasks_get_more_attempts_than_easy_ones():
    made = curriculum(3, groups=3, group_size=8, attempts=[2, 14], retire_after=0)
    assert made.attempts_of_step(1) == {"t0": 8, "t1": 8, "t2": 8}  # nothing is known yet

    made.note_step(1, {"t0": [0, 8], "t1": [4, 8], "t2": [8, 8]})
    assert made.attempts_of_step(2) == {"t0": 14, "t1": 8, "t2": 2}
    assert made.metrics(2)["curriculum/attempts_max"] == 14
    assert curriculum(3).attempts_of_step(1) == {}


def test_a_queued_task_names_its_number_of_attempts(tmp_path):
    source = TaskSource(attempts_config(tmp_path), None)
    assert source.curriculum is not None
    source.curriculum.note_step(
        1, {task.id: [number, 2] for number, task in enumerate(source.train(1))}
    )
    queued = source.tasks_to_queue(2)
    assert {task.metadata["queued_attempts"] for task in queued} > {4}
    assert sum(task.metadata["queued_attempts"] for task in queued) == 4 * len(queued)
    assert "queued_attempts" not in source.as_agent_task(queued[0]).metadata


def attempts_config(tmp_path, *overrides):
    path = tmp_path / "t.jsonl"
    rows = [{"id": f"t{n}", "query": f"{n}", "answer": "1"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "tasks": {"train": str(path), "curriculum": {"attempts": [2, 8]}},
        "agent": {"type": "single_turn"},
        "rewards": ["numeric"],
        "trainer": {"groups_per_step": 3, "group_size": 4},
        "evaluation": {"tasks": 1},
    }
    return build_config(tree, overrides)


def test_bounds_of_attempts_contain_the_mean(tmp_path):
    for override in (
        "trainer.group_size=9",
        "tasks.curriculum.attempts=[1,8]",
    ):
        with pytest.raises(ConfigError, match="must be a minimum of 2 or more"):
            attempts_config(tmp_path, override)


def test_what_contradicts_a_curriculum_is_refused(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"query": "a", "answer": "1"}\n')

    tree = {"agent": {"type": "single_turn"}, "rewards": ["numeric"]}
    section = {"train": str(file), "eval": str(file), "curriculum": True}
    for tasks, keys, words in (
        (section | {"weights": [1]}, (), "curriculum and weights"),
        (section | {"curriculum": {"windows": 2}}, (), "window"),
        (section, ("rollout.staleness=1", "rollout.policy=mask"), "tasks.curriculum chooses"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_config(tree | {"tasks": tasks}, keys)

    with pytest.raises(ConfigError, match="variant_of does not name a task"):
        curriculum([Task(id="a"), Task(id="b", metadata={"variant_of": "c"})])


@reward("test_odd_ones")
def odd_ones(task):
    return float(int(task.query.strip(" ?")) % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("tasks.curriculum.attempts=[2,5]", "trainer.group_size=3"),
        pytest.param(("rollout.staleness=1",), marks=pytest.mark.soak),
        pytest.param(
            ("rollout.staleness=1", "tasks.curriculum.attempts=[2,5]", "trainer.group_size=3"),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["synchronous", "attempts", "ahead", "attempts-ahead"],
)
def test_a_resumed_run_chooses_as_one_that_was_not_broken_off(tmp_path, quiet_view, keys):
    rows = [{"id": f"t{n}", "query": f"{n}?", "answer": "1"} for n in range(12)]
    files = {"train": tmp_path / "train.jsonl", "eval": tmp_path / "eval.jsonl"}
    for name, path in files.items():
        text = "".join(json.dumps(row | {"id": f"{name}-{row['id']}"}) + "\n" for row in rows)
        path.write_text(text.replace('?"', '? "') if name == "eval" else text)

    tree = {
        "model": {"name": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}},
        "tasks": {
            **{name: str(path) for name, path in files.items()},
            "curriculum": {"retire_after": 1},
        },
        "agent": {"type": "single_turn"},
        "rewards": ["test_odd_ones"],
        "sampling": {"max_new_tokens": 2},
        "trainer": {"groups_per_step": 3, "group_size": 2, "steps": 5},
        "evaluation": {"tasks": 2, "samples": 0, "every": 0},
        "tracking": {"report": False, "tensorboard": False},
        "checkpoint": {"every": 2},
    }

    def told(name, **options):
        config = build_config(tree, (*keys, f"run.dir={tmp_path / name}"))
        try:
            run = train(config, **options)
        except KeyboardInterrupt:
            return None

        assert run.audit().violations == []

        steps = read_metrics(tmp_path / name / "metrics.jsonl")
        return [
            (row["curriculum/retired"], row["curriculum/weight"], row["train/success"])
            for row in steps
            if "curriculum/weight" in row
        ], sorted(trajectory.task_id for trajectory in run.trajectories(split="train"))

    whole = told("whole", view=quiet_view())
    assert whole is not None and whole[0][-1][0] > 0  # something was retired
    assert told("broken", view=quiet_view(step=3)) is None
    assert told("broken", view=quiet_view(), resume=True) == whole


def test_the_order_of_refills_is_the_curriculums(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"id": f"t{n}", "query": f"{n}", "answer": "1"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_config(
        {
            "tasks": {"train": str(path), "curriculum": {}},
            "agent": {"type": "single_turn"},
            "rewards": ["numeric"],
            "trainer": {"groups_per_step": 4, "group_size": 2},
        }
    )
    source = TaskSource(config, None)
    played = [*source.train(1), *source.refill(1)]
    assert len(played) == len({task.id for task in played}) == 16
    assert [task.id for task in source.tasks_to_queue(1)] == [
        f"{task.id}~1" for task in source.train(1)
    ]
    assert source.as_agent_task(source.tasks_to_queue(1)[0]) == source.train(1)[0]
