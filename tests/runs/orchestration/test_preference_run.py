"""Whole runs that train by a preference loss: on sampled groups, on a file, on another run's
store."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from slow import soak

from agentevo.agents.environment_agent import demonstrate
from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.observability import read_metrics
from agentevo.rollout.tasks import environment_tasks, seed_of_task
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.orchestration.players import make_environment
from agentevo.runs.orchestration.preference_data import check_preference

pytestmark = pytest.mark.slow

PREFERENCE = ("algorithm.kl_coef=0", "algorithm.entropy_coef=0")
COINS = {
    "environment": {
        "type": "coins",
        "rule": "hidden",
        "num_coins": 2,
        "other_credit": 0,
        "mention_credit": 0,
    },
    "model": {"name": "tiny", "tiny": {"hidden_size": 64, "num_layers": 1, "num_heads": 2}},
    "agent": {"format": "plain", "max_turns": 1},
    "sampling": {"max_new_tokens": 3},
    "trainer": {
        "steps": 12,
        "groups_per_step": 16,
        "group_size": 8,
        "learning_rate": 1e-3,
        "minibatches": 2,
    },
    "cold_start": {
        "episodes": 64,
        "batch_episodes": 8,
        "learning_rate": 2e-3,
        "random_action_rate": 0.8,
    },
    "evaluation": {"tasks": 48, "every": 0},
    "checkpoint": {"every": 0},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 2, "threads": 1},
}


def stored(folder, **filters):
    async def read(store):
        return [trajectory async for trajectory in store.trajectories(split="train", **filters)]

    return read_store(folder, read)


def updates(folder):
    return [row for row in read_metrics(folder / "metrics.jsonl") if "preference/loss" in row]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, small_config, quiet_view):
    """An online DPO run, whose store other runs may learn from."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    train(small_config(folder, "algorithm.name=dpo", *PREFERENCE), view=quiet_view())
    return folder


@pytest.mark.parametrize("name", ["dpo", *soak("rft", "kto", "spin")])
def test_it_learns_from_sampled_groups(name, tmp_path, quiet_view):
    run = train(
        build_config(COINS, [f"algorithm.name={name}", f"run.dir={tmp_path / 'run'}"]),
        view=quiet_view(),
    )
    found = run.summary["eval"]
    assert found["sampled"]["after"] >= found["sampled"]["before"] + 0.2, found
    assert len(updates(run.dir)) >= 8


def test_every_attempt_is_trained_on_once_or_has_a_reason(sampled):
    found = stored(sampled)
    states = Counter((one.state, one.drop_reason) for one in found)
    assert states["committed", None] > 0
    assert states["dropped", "no-pair"] > 0
    assert set(states) <= {
        ("committed", None),
        ("dropped", "no-pair"),
        ("dropped", "zero-variance"),
    }

    rows = updates(sampled)
    assert sum(row["preference/num_pairs"] for row in rows) * 2 == states["committed", None]
    assert sum(row["rollout/dropped/no-pair"] for row in rows) == states["dropped", "no-pair"]
    assert all(one.trained_step == one.step for one in found if one.state == "committed")

    kept = {one.trajectory.group_id: [] for one in found if one.state == "committed"}
    for one in found:
        if one.trajectory.group_id in kept:
            kept[one.trajectory.group_id].append((one.trajectory.reward, one.state))

    for members in kept.values():
        rewards = [reward for reward, _ in members]
        assert {reward for reward, state in members if state == "committed"} == {
            min(rewards),
            max(rewards),
        }


@pytest.mark.parametrize("name", ["spin", *soak("dpo", "kto")])
def test_a_clean_stop_and_a_resume(
    name, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    settings = (
        f"algorithm.name={name}",
        *PREFERENCE,
        "trainer.steps=3",
        "evaluation.every=0",
        *(["algorithm.reference_every=2"] if name == "spin" else []),
    )
    train(small_config(tmp_path / "whole", *settings), view=quiet_view())
    with pytest.raises(KeyboardInterrupt):
        train(small_config(tmp_path / "parts", *settings), view=quiet_view(step=2))

    train(small_config(tmp_path / "parts", *settings), resume=True, view=quiet_view())
    one = outcome_of(tmp_path / "parts")
    other = outcome_of(tmp_path / "whole")
    assert_same(one["trainer"], other["trainer"])
    assert_same(one["weights"], other["weights"])
    assert_same(one["metrics"], other["metrics"])
    assert_same(one["trajectories"], other["trajectories"])


@pytest.fixture
def pair_file(tmp_path):
    """The right coin against the wrong one, for every lamp."""
    config = build_config(COINS)
    environment = make_environment(config)
    lines = []
    for task in environment_tasks("coins", 77, "train", 0, 60):
        (talk,) = demonstrate(environment, task.seed, config.agent, 0.0).conversations
        right = talk[-1].content
        wrong = next(
            action
            for n in range(99)
            if (action := environment.random_action(random.Random(n))) != right
        )
        prompt = [{"role": m.role, "content": m.content} for m in talk[:-1]]
        lines.append(
            {
                "prompt": prompt,
                "chosen": right,
                "rejected": [{"role": "assistant", "content": wrong}],
            }
        )

    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["kto", *soak("dpo")])
def test_it_learns_from_a_file_without_sampling(
    name, tmp_path, pair_file, quiet_view, outcome_of, assert_same
):
    def config(folder: str):
        return build_config(
            COINS,
            [f"algorithm.name={name}", f"data.pairs={pair_file}", f"run.dir={tmp_path / folder}"],
        )

    run = train(config("whole"), view=quiet_view())
    found = run.summary["eval"]
    assert found["before"] <= 0.7 and found["after"] >= 0.9, found
    assert stored(run.dir) == []

    rows = updates(run.dir)
    assert [row["preference/num_pairs"] for row in rows] == [16.0 if name == "dpo" else 32.0] * 12
    assert not any("engine/generated_tokens" in row for row in rows)

    with pytest.raises(KeyboardInterrupt):
        train(config("parts"), view=quiet_view(step=5))

    train(config("parts"), resume=True, view=quiet_view())
    one = outcome_of(tmp_path / "parts")
    other = outcome_of(tmp_path / "whole")
    assert_same(one["weights"], other["weights"])
    assert_same(one["metrics"], other["metrics"])


def test_it_learns_from_another_runs_store(sampled, tmp_path, small_config, quiet_view):
    checkpoint = sorted((sampled / "checkpoints").glob("step-*"))[-1]
    config = small_config(
        tmp_path / "run",
        "algorithm.name=ipo",
        *PREFERENCE,
        "algorithm.pairs=all",
        f"data.pairs_from={sampled}",
        "cold_start.episodes=0",
    )
    run = train(config, view=quiet_view())
    rows = updates(run.dir)
    assert len(rows) == 4
    assert all(row["preference/num_pairs"] > 3 for row in rows)
    assert stored(run.dir) == []

    other = small_config(
        tmp_path / "other",
        "algorithm.name=dpo",
        *PREFERENCE,
        f"data.pairs_from={sampled}",
        "model.tiny.tokenizer=byte",
        "agent.memory=turn",
    )
    with pytest.raises(
        ConfigError, match=rf"was sampled with another tokenizer .*model\.name={checkpoint}"
    ):
        train(other, view=quiet_view())


def test_what_is_missing_is_said_before_anything_is_created(tmp_path, small_config, quiet_view):
    base = ("algorithm.name=dpo", *PREFERENCE)
    for settings, said in (
        ((f"data.pairs={tmp_path / 'none.jsonl'}",), "can't be read"),
        ((f"data.pairs_from={tmp_path / 'none'}",), "is not the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(small_config(tmp_path / "run", *base, *settings), view=quiet_view())

    assert not (tmp_path / "run").exists()

    unsolved = build_config(
        {
            "environment": {"type": "gymnasium", "id": "CartPole-v1"},
            "model": {"name": "tiny"},
            "algorithm": {"name": "spin"},
        },
        [f"run.dir={tmp_path / 'run'}"],
    )
    with pytest.raises(
        ConfigError,
        match=r"no solver, which algorithm\.pairs=demonstrations asks: set algorithm\.pairs=best",
    ):
        check_preference(unsolved)


def test_pairs_with_a_solver_in_pictures_are_refused():
    config = build_config(
        {
            "environment": {"type": "frozen_lake", "observation": "image"},
            "algorithm": {"name": "dpo", "pairs": "demonstrations"},
        }
    )
    with pytest.raises(ConfigError, match=r"can't show the solver's images .*best_worst"):
        check_preference(config)


def test_another_file_is_another_run(tmp_path, pair_file, quiet_view):
    settings = [
        "algorithm.name=orpo",
        f"data.pairs={pair_file}",
        f"run.dir={tmp_path / 'run'}",
        "trainer.steps=1",
    ]
    train(build_config(COINS, settings), view=quiet_view())
    copied = tmp_path / "copy.jsonl"
    copied.write_text(pair_file.read_text())
    with pytest.raises(ConfigError, match=r"was started with data\.pairs="):
        train(
            build_config(COINS, [*settings, f"data.pairs={copied}"]), resume=True, view=quiet_view()
        )


def test_the_environment_of_a_task_is_known_by_its_id():
    tasks = environment_tasks("coins", 9, "train", 3, 4) + environment_tasks(
        "coins", 9, "eval", 0, 2
    )
    assert [seed_of_task(9, task.id) for task in tasks] == [task.seed for task in tasks]
    for name in ("mine", "train-x", "other-3"):
        with pytest.raises(ValueError, match="is not the id of an environment's task"):
            seed_of_task(9, name)
