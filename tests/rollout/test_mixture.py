"""Mixtures of sources: their shares, that no round repeats a task, and that every process and
every resumed run has the same order."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.rollout.task_source import Mixture, TaskSource, source_names
from agentevo.runs.orchestration.step_metrics import metrics_by_source
from agentevo.types import Trajectory

SOURCES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4).map(
    lambda pairs: tuple(zip(*pairs, strict=True))
)


@given(SOURCES, st.integers(0, 3))
def test_rounds_have_their_shares_and_no_task_twice(sources, seed):
    sizes, weights = sources
    mixture = Mixture(sizes, weights, seed, at_least=1)
    places = [number for number, size in enumerate(sizes) for _ in range(size)]
    rounds = [mixture.order(number) for number in range(5)]
    for order in rounds:
        assert len(set(order)) == len(order) == mixture.round_size
        counts = Counter(places[task] for task in order)
        assert [counts[number] for number in range(len(sizes))] == mixture.shares

    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    for share, size, weight in zip(mixture.shares, sizes, weights, strict=True):
        assert share <= size and abs(share - weight * scale) <= 1

    again = Mixture(sizes, weights, seed, at_least=1)
    assert [again.order(number) for number in (4, 0)] == [rounds[4], rounds[0]]


def test_a_source_is_gone_through_before_it_is_begun_again():
    mixture = Mixture((10, 3), (1.0, 1.0), 0, at_least=1)
    seen = [task for number in range(3) for task in mixture.order(number) if task < 10]
    assert len(set(seen)) == len(seen) == 9
    assert {task for number in range(9) for task in mixture.order(number)} == set(range(13))


def lines(path, kind, count):
    rows = [{"id": f"{kind}{n}", "query": f"{n}?", "answer": "1"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(tmp_path, weights, groups=3, **tasks):
    given = {
        "train": [lines(tmp_path / "a.jsonl", "a", 30), lines(tmp_path / "b.jsonl", "b", 8)],
        "eval": lines(tmp_path / "e.jsonl", "e", 4),
        "weights": weights,
    }
    return build_config(
        {
            "tasks": given | tasks,
            "agent": {"type": "single_turn"},
            "rewards": ["numeric"],
            "trainer": {"groups_per_step": groups},
            "evaluation": {"tasks": 2},
        }
    )


def attempt(task, reward):
    return Trajectory(
        id=task, task_id=task, group_id="g", reward=reward, success=reward >= 1, status="completed"
    )


def test_a_run_plays_the_mixture_and_the_same_one_when_it_is_resumed(tmp_path):
    mixed = TaskSource(config(tmp_path, [2, 1]), None)
    steps = {step: [task.id for task in mixed.train(step)] for step in range(1, 41)}
    names = [name[0] for found in steps.values() for name in found]
    assert names.count("a") == 2 * names.count("b")
    assert all(len(set(found)) == 3 for found in steps.values())

    resumed = TaskSource(config(tmp_path, [2, 1]), None)
    assert [task.id for task in resumed.train(33)] == steps[33]

    queued = [task.id for step in range(1, 41) for task in mixed.tasks_to_queue(step)]
    assert len(set(queued)) == len(queued), "every queued task is one of its own"
    assert [mixed.as_agent_task(task).id for task in mixed.tasks_to_queue(33)] == steps[33]
    assert [task.id for task in mixed.held_out()] == ["e0", "e1"]
    assert {mixed.source_of(name) for name in queued if name.startswith("a")} == {"a"}
    assert {mixed.source_of(name) for name in queued if name.startswith("b")} == {"b"}
    assert mixed.source_of("e0") is None

    found = metrics_by_source(
        [attempt("a1", 1.0), attempt("b2~3", 0.5), attempt("b3", 0.0), attempt("e0", 9.0)],
        mixed.source_of,
    )
    assert found == {
        "reward_by_source/a/mean": 1.0,
        "reward_by_source/a/success": 1.0,
        "reward_by_source/b/mean": 0.25,
        "reward_by_source/b/success": 0.0,
    }


@pytest.mark.parametrize(
    ("weights", "changes", "problem"),
    [
        ([2], {}, "weights has 1 numbers for 2 sources of train"),
        ([2, 0], {}, "tasks.weights"),
        ([2, 1], {"eval": []}, "the held-out tasks must be given"),
    ],
)
def test_a_wrong_mixture_is_refused(tmp_path, weights, changes, problem):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, weights, **changes)
    assert problem in str(caught.value)


def test_a_mixture_that_fills_no_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"a round has 24, and a step needs .*=25"):
        TaskSource(config(tmp_path, [2, 1], groups=25), None)
    empty = tmp_path / "none.jsonl"
    empty.write_text('{"no": "query"}\n')
    with pytest.raises(ConfigError, match=r"tasks.weights: no row of .*none.jsonl is a task"):
        TaskSource(config(tmp_path, [2, 1], train=[str(tmp_path / "a.jsonl"), str(empty)]), None)


def test_every_source_has_a_name_of_its_own():
    names = source_names(["x/a.jsonl", "y/a.jsonl", "a_1.jsonl", "a_0", "o/n:train", "b.jsonl.gz"])
    assert names == ["a_0_", "a_1_", "a_1", "a_0", "n_train", "b"]
    assert source_names(["x/a.jsonl", "y/a.jsonl"]) == ["a_0", "a_1"]
