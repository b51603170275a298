"""Whole runs of models that compute rows: `coins` and a tool agent learn with each of today's
architectures, a run that is killed and resumed is the run that nobody killed, and every trainer
takes such a model. Slow."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from functools import cache

import pytest
from run_fixtures import SMALL
from slow import soak
from todays_models import ARCHITECTURES, write_model

from agentevo.agents.tool_servers.lessons import LESSONS
from agentevo.agents.tool_servers.lessons.lesson import demonstrations, lesson_tasks
from agentevo.api.run import sft, train
from agentevo.config import RunConfig, build_config, to_yaml
from agentevo.observability import read_metrics
from agentevo.runs.orchestration.players import corpus_of

pytestmark = pytest.mark.slow
IN_CI = "qwen3_next"

KILLED = """
import os, signal, sys
from agentevo.config import load_config
from agentevo.observability import LiveView
from agentevo.api.run import train

class View(LiveView):
    def phase(self, name, detail=""):
        if f"{name} {detail}" == "training step 2":
            os.kill(os.getpid(), signal.SIGKILL)

view = View("killed", plain=True, stream=open(os.devnull, "w"))
train(load_config(sys.argv[1], needs_environment=False), view=view)
"""
ONE_BY_ONE = ("engine.max_running=1", "engine.prefix_sharing=false")
"""In company, log-probs depend on the other requests, up to rounding."""
COMMON = {
    "evaluation": {"tasks": 4, "samples": 0, "every": 0},
    "checkpoint": {"every": 1},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 5, "threads": 1},
}
COINS = COMMON | {
    "environment": {"type": "coins", "rule": "match", "num_coins": 2},
    "agent": {"format": "plain", "max_turns": 1},
    "sampling": {"max_new_tokens": 4},
    "cold_start": {"episodes": 96, "batch_episodes": 8, "learning_rate": 5e-3},
    "trainer": {"groups_per_step": 8, "group_size": 8, "learning_rate": 3e-3},
}
TOOL = COMMON | {
    "agent": {"type": "tool_agent", "tools": ["calculator"], "max_turns": 3},
    # Whether or not a model solves a task, its attempts get different rewards.
    "rewards": ["numeric", {"name": "length", "max_length": 1, "margin": 100}],
    "sampling": {"max_new_tokens": 24},
    "trainer": {"groups_per_step": 4, "group_size": 4, "learning_rate": 3e-3},
}
LESSON = LESSONS["calculator"]


@pytest.fixture(scope="module")
def coins_model(tmp_path_factory):
    """The folder of an architecture whose tokenizer has the words of coins."""
    corpus = list(corpus_of(build_config(COINS, [])))
    return lambda name: write_model(name, tmp_path_factory.mktemp(name), corpus)


@pytest.fixture(scope="module")
def shown():
    """Conversations that solve tasks with the calculator."""
    tasks = lesson_tasks(LESSON, 60, seed=1)
    return list(demonstrations(LESSON, tasks, seed=0, options={}))


@pytest.fixture
def tool_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    rows = lesson_tasks(LESSON, 24, seed=2)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(tree, model, folder, *overrides: str, **sections) -> RunConfig:
    tree = copy.deepcopy(tree) | {"model": {"name": str(model), "device": "cpu"}} | sections
    return build_config(tree, [f"run.dir={folder}", *overrides], needs_environment=False)


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def trained_steps(folder) -> list[dict]:
    """The metrics of the steps. Log-probs in training are those of the engine."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "critic/score/mean" in row]
    gaps = [row["actor/logprob_diff_max"] for row in rows if "actor/logprob_diff_max" in row]
    assert gaps, "no attempt was trained on"
    assert max(gaps) < 1e-4
    return rows


@pytest.fixture
def check_killed(tmp_path, quiet_view, outcome_of, assert_same):
    """Runs a config whole, and killed in its second step and resumed: both are the same."""

    def check(make) -> list[dict]:
        whole = make(tmp_path / "whole", *ONE_BY_ONE)
        assert train(whole, view=quiet_view()).audit().ok

        config = make(tmp_path / "run", *ONE_BY_ONE)
        recipe = tmp_path / "run.yaml"
        recipe.write_text(to_yaml(config))
        ended = run_python("-c", KILLED, str(recipe))
        assert ended.returncode == -signal.SIGKILL, ended.stderr

        assert train(config, resume=True, view=quiet_view()).audit().ok
        assert_same(outcome_of(config.run_dir), outcome_of(whole.run_dir))
        return trained_steps(whole.run_dir)

    return check


@pytest.mark.parametrize("name", [IN_CI, *soak(*(name for name in ARCHITECTURES if name != IN_CI))])
def test_two_steps(name, coins_model, tool_tasks, tmp_path, quiet_view):
    """Of coins, and one of a tool agent whose untrained policy makes no call."""
    model = coins_model(name)
    few = ["trainer.steps=2", "trainer.groups_per_step=3", "cold_start.episodes=16"]
    config = make_config(COINS, model, tmp_path / "coins", *few)
    assert train(config, view=quiet_view()).audit().ok
    trained_steps(config.run_dir)

    config = make_config(
        TOOL,
        model,
        tmp_path / "tool",
        "trainer.steps=1",
        rewards=[{"name": "format", "pattern": r"(?s)[a-z ].*"}],
        tasks={"train": tool_tasks},
    )
    assert train(config, view=quiet_view()).audit().ok
    trained_steps(config.run_dir)


@pytest.mark.parametrize("name", soak(*ARCHITECTURES))
def test_coins_is_learned_killed_or_not(name, coins_model, check_killed):
    model = coins_model(name)

    def make(folder, *overrides):
        return make_config(COINS, model, folder, "trainer.steps=4", *overrides)

    scores = [row["critic/score/mean"] for row in check_killed(make)]
    assert len(scores) == 4
    assert sum(scores[2:]) > sum(scores[:2])


@pytest.mark.parametrize("name", soak(*ARCHITECTURES))
def test_a_tool_agent_is_the_same_killed_or_not(
    name, shown, tool_tasks, tmp_path, quiet_view, check_killed
):
    model = write_model(name, tmp_path / "model", map(json.dumps, shown))
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in shown))
    reading = make_config(
        COMMON,
        model,
        tmp_path / "sft",
        data={"train": str(chats), "eval_share": 0},
        sft={"epochs": 5, "batch_conversations": 8, "learning_rate": 1e-2},
    )
    reader = sft(reading, view=quiet_view()).dir

    def make(folder, *overrides):
        tasks = {"train": tool_tasks}
        return make_config(TOOL, reader, folder, "trainer.steps=4", *overrides, tasks=tasks)

    rows = check_killed(make)
    assert len(rows) == 4


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """The folder of an architecture over bytes."""
    return cache(lambda name: write_model(name, tmp_path_factory.mktemp(name), (), "byte"))


@pytest.fixture
def lake_config(byte_model):
    """Several turns in frozen_lake, with all state that a run keeps."""

    def make(name, folder, *overrides: str) -> RunConfig:
        # What begins with a byte beyond ASCII: half of what a fresh policy says.
        rewards = [{"name": "format", "pattern": r"(?s)[^\x00-\x7f].*"}]
        sections = {"cold_start": {"episodes": 0}, "rewards": rewards}
        sections["evaluation"] = {"tasks": 1, "samples": 0}
        sections["trainer"] = SMALL["trainer"] | {"steps": 2, "groups_per_step": 2}
        keys = ["evaluation.every=0", "checkpoint.every=1"]
        return make_config(SMALL, byte_model(name), folder, *keys, *overrides, **sections)

    return make


@pytest.mark.parametrize("name", ["lfm2", *soak("qwen3_next", "nemotron_h")])
def test_killed_and_resumed_bit_for_bit(name, lake_config, check_killed):
    assert len(check_killed(lambda *words: lake_config(name, *words))) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=ppo", "critic.trunk=own", "model.lora.rank=2"),
        *soak(
            ("memory.checkpointing=full", "algorithm.kl_coef=0.01"),
            ("algorithm.name=ppo", "critic.trunk=shared"),
            ("algorithm.name=dpo", "algorithm.pairs=best_worst"),
        ),
    ],
    ids=["own critic, LoRA", "reference", "shared critic", "DPO"],
)
def test_every_trainer_takes_it(overrides, lake_config, tmp_path, quiet_view):
    config = lake_config("lfm2", tmp_path / "run", *overrides)
    train(config, view=quiet_view())
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert sum("actor/lr" in row for row in rows) == 2
