"""What a run is made of: where its tasks come from, what an agent function may return."""

from __future__ import annotations

import asyncio
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vision import write_tiny_vision

from agentevo.agents import FunctionAgent, Outcome
from agentevo.agents.policy import Policy
from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.models.vision.parts import reads_text_only, vision_parameters
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.orchestration.components import load_policy, open_components
from agentevo.runs.orchestration.players import make_environment
from agentevo.types import Task
from examples import examples


def config_of(**sections):
    return build_config(sections, needs_environment=False)


def source(num_tasks: int, per_step: int = 2, held_out: int = 64, seed: int = 0) -> TaskSource:
    config = config_of(
        trainer={"groups_per_step": per_step}, evaluation={"tasks": held_out}, run={"seed": seed}
    )
    return TaskSource(config, [Task(id=f"t{n}") for n in range(num_tasks)])


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(2, 30), st.integers(1, 12), st.integers(1, 40), st.integers(0, 3))
def test_given_tasks_are_split_once_and_a_step_never_has_one_twice(
    num_tasks, per_step, held_out, seed
):
    """Twice in a step would be one group of twice the members, with the same ids."""
    tasks, again = (source(num_tasks, per_step, held_out, seed) for _ in range(2))
    eval_ids = [task.id for task in tasks.held_out()]
    assert len(eval_ids) == max(1, min(held_out, num_tasks // 5))

    pool = num_tasks - len(eval_ids)
    for step in range(1, 8):
        ids = [task.id for task in tasks.train(step)]
        assert len(ids) == len(set(ids)) == min(per_step, pool)
        assert not set(ids) & set(eval_ids)
        assert ids == [task.id for task in again.train(step)], "a resumed run gets the same"


def test_rounds_are_shuffled_anew_and_leave_hardly_anyone_out():
    tasks = source(13, per_step=3, held_out=1)
    assert [task.id for task in tasks.held_out()] == ["t12"]

    rounds = [
        [task.id for step in range(4 * r + 1, 4 * r + 5) for task in tasks.train(step)]
        for r in range(6)
    ]
    assert all(sorted(one) == sorted(f"t{n}" for n in range(12)) for one in rounds), (
        "12 tasks, 3 a step: 4 steps see each once"
    )
    assert len({tuple(one) for one in rounds}) == 6
    assert [task.id for task in source(13, 3, 1, seed=1).train(1)] != rounds[0][:3]


def test_what_does_not_fill_a_step_waits_for_the_next_round():
    tasks = source(6, per_step=3, held_out=1)  # 5 to train on
    seen = [task.id for step in range(1, 21) for task in tasks.train(step)]
    assert set(seen) == {f"t{n}" for n in range(5)}


def test_tasks_of_an_environment_are_new_in_every_step():
    config = build_config(
        {
            "environment": {"type": "coins"},
            "trainer": {"groups_per_step": 3},
            "evaluation": {"tasks": 5},
        }
    )
    tasks = TaskSource(config, None)
    ids = [task.id for step in range(1, 4) for task in tasks.train(step)]
    assert ids == [f"train-{n}" for n in range(9)]
    assert [task.id for task in tasks.held_out()] == [f"eval-{n}" for n in range(5)]
    assert {task.environment for task in tasks.held_out()} == {"coins"}


def test_refills_are_nobody_elses_tasks():
    config = build_config(
        {
            "environment": {"type": "coins"},
            "trainer": {"groups_per_step": 3},
            "evaluation": {"tasks": 50},
        }
    )
    tasks = TaskSource(config, None)
    refills = [task for step in range(1, 12) for task in islice(tasks.refill(step), 20)]
    others = tasks.held_out() + [task for step in range(1, 200) for task in tasks.train(step)]
    assert len({task.id for task in refills} | {task.id for task in others}) == len(refills) + len(
        others
    )
    assert len({task.seed for task in refills} | {task.seed for task in others}) == len(
        refills
    ) + len(others)
    assert {task.seed % 4 for task in refills} == {0}, (
        "apart from held-out environments and demonstrations by their seeds"
    )
    assert (
        list(islice(tasks.refill(3), 5))
        == list(islice(tasks.refill(3), 5))
        == [task for task in refills if "-3+" in task.id][:5]
    )


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(2, 30), st.integers(1, 12), st.integers(1, 40), st.integers(0, 3))
def test_given_tasks_refill_a_step_with_all_others_once(num_tasks, per_step, held_out, seed):
    tasks, again = (source(num_tasks, per_step, held_out, seed) for _ in range(2))
    for step in range(1, 5):
        ids = [task.id for task in (*tasks.train(step), *tasks.refill(step))]
        assert sorted(ids) == sorted(
            {f"t{n}" for n in range(num_tasks)} - {task.id for task in tasks.held_out()}
        )
        assert list(tasks.refill(step)) == list(again.refill(step))


@pytest.mark.parametrize("num_tasks", [0, 1])
def test_too_few_tasks_are_refused(num_tasks):
    with pytest.raises(ConfigError, match=f"{num_tasks} given, at least 2 are needed"):
        source(num_tasks)


@pytest.mark.parametrize(
    ("returned", "reward", "success"),
    [
        (None, None, False),
        ({"right": 1.0, "short": -0.25}, 0.75, False),
        (0, 0.0, False),
        (0.5, 0.5, False),
        (1, 1.0, True),
        (True, 1.0, True),
        (Outcome(reward=-1.0, success=True), -1.0, True),
    ],
)
def test_what_an_agent_function_may_return(returned, reward, success):
    async def agent(task, policy):
        return returned

    policy = Policy(SimpleNamespace(received=()))
    outcome = asyncio.run(FunctionAgent(agent).run(Task(id="t"), policy))
    assert (outcome.reward, outcome.success) == (reward, success)


def test_an_environments_limit_is_the_smaller_of_its_own_and_the_agents():
    config = build_config(
        {
            "environment": {"type": "frozen_lake", "max_actions": 20},
            "agent": {"max_turns": 3, "actions_per_turn": 2},
        }
    )
    assert make_environment(config).config.max_actions == 6
    with pytest.raises(ConfigError, match="this run has none"):
        make_environment(config_of())


def test_the_tiny_policy_knows_every_word_of_its_environment(tmp_path):
    """Words that only other seeds of the environment use are tokens too, and the parts share one
    model."""
    config = build_config(
        {
            "environment": {"type": "coins"},
            "model": {"name": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        },
        [f"run.dir={tmp_path}"],
    )

    async def work():
        async with open_components(config, store_url=f"sqlite:///{tmp_path / 's.sqlite'}") as parts:
            assert parts.engine.model is parts.model
            environment = make_environment(config)
            for seed in range(50):
                text = environment.reset(seed=seed)[0] + " " + (environment.optimal_action() or "")
                ids = parts.tokenizer.encode(text, add_special_tokens=False)
                assert parts.tokenizer.decode(ids) == text
                assert len(ids) < len(text) / 2

    asyncio.run(work())


@pytest.mark.slow
def test_a_checkpoint_of_a_model_that_sees_is_trained_on_as_the_recipe_says(tmp_path):
    """A resumed run loads its checkpoint. No file of it says what is frozen, or that the run shows
    no images."""
    folder = write_tiny_vision("qwen2_vl", tmp_path / "model")

    def load(vision, checkpoint):
        config = config_of(model={"name": str(folder), "vision": vision})
        return load_policy(config, checkpoint).model

    for checkpoint in (None, folder):
        model = load({"freeze": ["tower"]}, checkpoint)
        assert not any(p.requires_grad for _, p in vision_parameters(model, ["tower"]))
        assert all(p.requires_grad for _, p in vision_parameters(model, ["projector"]))
        assert reads_text_only(load({"images": False}, checkpoint))
