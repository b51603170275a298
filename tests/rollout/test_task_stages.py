"""Training by stages: which step is of which, from the committed records alone; and what no stage
can be made of is refused."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.api.run import train
from agentevo.config import build_config, load_config
from agentevo.config.tasks import TaskStage
from agentevo.errors import ConfigError
from agentevo.observability.metrics import read_metrics
from agentevo.rewards import reward
from agentevo.rollout.task_source import TaskSource
from agentevo.rollout.task_stages import TaskStages

EASY_FIRST = [
    {"name": "easy", "where": {"difficulty": {"max": 2}}, "until_step": 7},
    {"name": "hard", "where": {"extra.kind": ["a", "b"], "difficulty": {"min": 2}}},
]


def rows(path, count, **extra):
    made = [
        {
            "id": f"{path.stem}{n}",
            "query": f"{n}?",
            "answer": "1",
            "difficulty": 1 + n % 4,
            "extra": {"kind": "abc"[n % 3]},
        }
        | extra
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return str(path)


def config(tmp_path, stages, *overrides, **sections):
    tasks = {
        "train": [rows(tmp_path / "a.jsonl", 40), rows(tmp_path / "b.jsonl", 8, difficulty=9)],
        "eval": rows(tmp_path / "e.jsonl", 8),
        "stages": stages,
    }
    tree = {
        "tasks": tasks,
        "agent": {"type": "single_turn"},
        "rewards": ["numeric"],
        "trainer": {"groups_per_step": 4, "group_size": 2},
        "evaluation": {"tasks": 8},
    }
    return build_config(tree | sections, overrides)


def level(task):
    return task.metadata["difficulty"]


def test_steps_play_the_tasks_of_their_stage_and_queued_ones_are_all_different(tmp_path):
    source = TaskSource(config(tmp_path, EASY_FIRST), None)
    easy = [task for step in range(1, 8) for task in source.train(step)]
    hard = [task for step in range(8, 30) for task in source.train(step)]

    assert {level(task) for task in easy} == {1, 2}
    assert {level(task) for task in hard} == {2, 3, 4, 9}
    assert {task.metadata["extra"]["kind"] for task in hard} == {"a", "b"}
    assert [source.stage_of(step) for step in (1, 7, 8, 99)] == [1, 1, 2, 2]

    queued = [task for step in range(1, 30) for task in source.tasks_to_queue(step)]
    assert len({task.id for task in queued}) == len(queued) == 29 * 4
    assert [source.as_agent_task(task).id for task in queued] == [task.id for task in easy + hard]

    again = TaskSource(config(tmp_path, EASY_FIRST), None)
    assert again.tasks_to_queue(20) == source.tasks_to_queue(20), "a resumed run begins at any step"
    assert all(level(task) <= 2 for task in source.refill(3))

    held_out = source.held_out_by_stage()
    assert held_out["easy"] == {"e0", "e1", "e4", "e5"}
    assert held_out["hard"] == {"e1", "e3", "e6", "e7"}


def test_a_stage_may_be_a_file_and_mixes_what_it_has_by_the_weights(tmp_path):
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "e.jsonl")]
    stages = [
        {"name": "one", "sources": files, "until_step": 3},
        {"name": "all"},
    ]
    tree = config(tmp_path, stages, "tasks.weights=[1, 1]")
    source = TaskSource(tree, None)
    names = [[task.id[0] for task in source.train(step)] for step in range(1, 9)]
    assert {name for found in names[:3] for name in found} == {"a"}
    assert [found.count("b") for found in names[3:7]] != [0, 0, 0, 0]
    assert sum(found.count("b") for found in names[3:7]) == 8, "a round of 8 and 8"
    assert source.held_out_by_stage()["one"] == {f"e{n}" for n in range(8)}

    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "tasks: {train: [a.jsonl, b.jsonl], eval: e.jsonl,"
        " stages: [{name: one, sources: a.jsonl, until_step: 3}, {name: all}]}\n"
        "rewards: [numeric]\n"
    )
    assert load_config(recipe).tasks.stages[0].sources == (files[0],), "paths as those of train"


SUCCESS = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=30)


@given(SUCCESS, st.integers(0, 3), st.integers(1, 3), st.one_of(st.none(), st.integers(2, 9)))
def test_a_stage_ends_by_what_was_committed_and_by_nothing_else(success, lag, window, until):
    stages = [
        TaskStage(name="a", until_success=0.5, success_window=window, until_step=until),
        TaskStage(name="b", until_success=0.7, success_window=window),
        TaskStage(name="c"),
    ]

    def told(count):
        made = TaskStages(stages, lag=lag)
        for step, value in enumerate(success[:count], start=1):
            made.note_step(step, value)
        return made

    early = told(0)
    late = told(len(success))
    for step in range(1, len(success) + 2 + lag):
        known = step - 1 - lag
        if known > 0:
            early.note_step(known, success[known - 1])
        if 0 <= known < len(success):
            assert not early.is_known(step + 1)

        begins = early.begins(step)
        assert begins == late.begins(step), "what comes later changes nothing"
        assert begins == told(max(known, 0)).begins(step), "nor does what was asked before"

        for stage, (first, after) in zip(stages, pairwise(begins), strict=False):
            by_step = stage.until_step is not None and after == stage.until_step + 1
            window_of = success[after - 1 - lag - window : after - 1 - lag]
            assert by_step or (
                None not in window_of
                and sum(window_of) / window >= stage.until_success
                and after - 1 - lag - window >= first - 1
            )


def test_a_step_whose_stage_is_not_decided_yet_has_no_tasks(tmp_path):
    stages = [{"name": "easy", "where": {"difficulty": 1}, "until_success": 0.5}, {"name": "all"}]
    source = TaskSource(config(tmp_path, stages), None)
    assert len(source.train(1)) == 4
    with pytest.raises(ValueError, match="the stage of step 2 is not decided yet"):
        source.tasks_to_queue(2)


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([{"name": "a", "where": {"level": 1}, "until_step": 1}, {"name": "b"}], "no task has the"),
        (
            [{"name": "a", "where": {"difficulty": 5}, "until_step": 1}, {"name": "b"}],
            "no task to train on is of the stage 'a' (where difficulty 5); 'difficulty' is 1, 2",
        ),
        (
            [{"name": "a", "where": {"difficulty": {"min": 3}, "id": 1}}],
            "no task has the key 'id', they have difficulty, extra",
        ),
        ([{"name": "a", "where": {"difficulty": True}}], "no task to train on"),
        (
            [{"name": "a", "where": {"difficulty": "1"}}],
            "no task to train on is of the stage 'a' (where difficulty '1')",
        ),
        ([{"name": "a", "until_step": 1}], "tasks: stages[0]: the last stage lasts to the end"),
        ([{"name": "a"}, {"name": "b"}], "stages[0]: the stage has no end"),
        ([{"name": "a", "until_step": 1}, {"name": "a"}], "the name of another stage"),
        (
            [{"name": "a", "until_step": 4}, {"name": "b", "until_step": 4}, {"name": "c"}],
            "stages[1].until_step: 4 is not after 4",
        ),
        (
            [{"name": "a", "until_success": 1}, {"name": "b", "until_step": 4}, {"name": "c"}],
            "stages[1].until_step: an earlier stage has none",
        ),
        ([{"name": "a", "sources": ["no.jsonl"]}], "no.jsonl is not a source of train"),
        ([{"name": "a", "until": 3}], "stages[0].until: unknown key; did you mean until_step?"),
        ([{"where": {}}], "stages[0].name: missing"),
        ([{"name": "a", "until_step": "soon"}], "stages[0].until_step: got 'soon'; needs a whole"),
        ([{"name": "a", "where": {"d": {"low": 1}}}], "a range is written {min: 1, max: 3}"),
        ([{"name": "a", "where": {"d": {"min": 2, "max": 1}}}], "min 2 is above max 1"),
        ([{"name": "a", "where": {"d": {"min": "x"}}}], "min and max are numbers"),
        ([{"name": "a", "where": {"d": []}}], "needs a value, a list of values"),
        (["easy"], "tasks.stages[0]: got 'easy'; needs a list of mappings with keys such as name"),
        ("easy", "tasks.stages"),
    ],
    ids=str,
)
def test_wrong_stages_are_refused_with_what_is_wrong(tmp_path, stages, problem):
    with pytest.raises(ConfigError) as caught:
        TaskSource(config(tmp_path, stages), None)
    assert problem in str(caught.value)


def test_stages_need_tasks_that_fill_a_step_held_out_ones_and_an_order_of_steps(tmp_path):
    two = [{"name": "a", "where": {"difficulty": 1}, "until_success": 0.5}, {"name": "b"}]
    with pytest.raises(ConfigError, match=r"'a' \(where difficulty 1\) has 10 of 48 tasks.*=11"):
        TaskSource(config(tmp_path, two, "trainer.groups_per_step=11"), None)
    with pytest.raises(ConfigError, match="reported for each stage: give eval"):
        config(tmp_path, two, "tasks.eval=[]")
    with pytest.raises(ConfigError, match="until_success chooses the tasks of a step"):
        config(tmp_path, two, "rollout.staleness=1", "rollout.policy=mask")
    with pytest.raises(ConfigError, match="stages choose among the tasks of train"):
        build_config({"environment": {"type": "coins"}, "tasks": {"stages": two}})


@reward("test_solves_easy_ones")
def solves_easy_ones(task):
    return float(level(task) <= 2)


SMALL = {
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
    "sampling": {"max_new_tokens": 2},
    "trainer": {"steps": 5, "groups_per_step": 4, "group_size": 2},
    "rewards": ["test_solves_easy_ones"],
    "tracking": {"report": False, "tensorboard": False},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "stages_played"),
    [
        ((), [1, 1, 2, 2, 2]),
        pytest.param(("rollout.staleness=1",), [1, 1, 1, 2, 2], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_run_and_a_resumed_one_go_on_to_the_next_stage_by_success(
    tmp_path, quiet_view, keys, stages_played
):
    stages = [
        {**EASY_FIRST[0], "until_step": 9, "until_success": 1.0, "success_window": 2},
        {"name": "hard", "where": {"difficulty": {"min": 3}}},
    ]

    def told(name, **options):
        made = config(tmp_path, stages, *keys, f"run.dir={tmp_path / name}", **SMALL)
        try:
            run = train(made, **options)
        except KeyboardInterrupt:
            return None

        assert run.audit().violations == []

        found = read_metrics(tmp_path / name / "metrics.jsonl")
        by_stage = [key for row in found for key in row if "/success_by_stage/greedy/" in key]
        assert {key.rpartition("/")[2] for key in by_stage} == {"easy", "hard"}
        return [
            (row["training/stage"], row["train/success"])
            for row in found
            if "training/stage" in row
        ]

    whole = told("whole", view=quiet_view())
    assert [stage for stage, _ in whole] == stages_played
    assert [success for _, success in whole] == [float(stage == 1) for stage in stages_played]
    assert told("broken", view=quiet_view(step=2)) is None
    assert told("broken", view=quiet_view(), resume=True) == whole
