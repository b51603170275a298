"""Evaluation: greedy and sampled, beside the two reference players; what failed counts in
neither success nor reward, and is said."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from agentevo.config import build_config
from agentevo.config.named_agents import NamedAgentSection
from agentevo.environments import TextEnvironment, make
from agentevo.observability.metrics import read_evaluations
from agentevo.runs.orchestration.evaluation import (
    Evaluated,
    evaluate,
    headline,
    meaning_of_success,
    reference_players,
    solved_share,
)
from agentevo.types import Baselines, Task, Trajectory

LATE = "the episode took longer than agent.timeout_s=300 s"
TASKS = [Task(id=f"eval-{n}", seed=n) for n in range(4)]


class Sampler:
    """Answers with prepared trajectories and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict] = []

    async def sample(self, tasks, **arguments):
        self.asked.append({"tasks": tasks, **arguments})
        found = []
        for task in tasks:
            for attempt in range(arguments["attempts"]):
                status = "failed" if task.id == "eval-3" else "completed"
                success = task.id in ("eval-0", "eval-3") or (attempt == 1)
                found.append(
                    Trajectory(
                        id=f"{task.id}#{attempt}",
                        task_id=task.id,
                        group_id=task.id,
                        reward=float(success),
                        success=success,
                        status=status,
                        error=LATE if status == "failed" else None,
                    )
                )

        return found


def parts_of(**sections) -> SimpleNamespace:
    config = build_config({"environment": {"type": "coins", "num_coins": 4}} | sections)
    return SimpleNamespace(
        config=config,
        sampler=Sampler(),
        tasks=SimpleNamespace(held_out=lambda: TASKS),
        note=lambda text: None,
    )


def test_greedy_and_sampled():
    parts = parts_of(evaluation={"temperature": 0.6})
    evaluated = asyncio.run(
        evaluate(parts, 7, samples=2, players=Baselines(random=0.25, optimal=None))
    )
    found = evaluated.metrics

    assert [
        (one["label"], one["attempts"], one["temperature"], one["split"], one["step"])
        for one in parts.sampler.asked
    ] == [
        ("greedy", 1, 0.0, "eval", 7),
        ("sampled", 2, 0.6, "eval", 7),
    ]
    assert found["val-core/coins/success/greedy"] == 1 / 3, "of the three that completed"
    assert found["val-core/coins/success/sampled"] == (2 + 1 + 1) / 6
    assert found["val-core/coins/reward/greedy"] == 1 / 3, "the same three"
    assert found["val-core/coins/reward/sampled"] == (2 + 1 + 1) / 6
    assert found["val-aux/coins/failed/greedy"] == 0.25
    assert found["val-aux/coins/failed_by/greedy/timeout"] == 1
    assert found["val-aux/coins/failed_by/sampled/timeout"] == 2
    assert evaluated.failures == (
        "3 of 12 failed: 3 took longer than agent.timeout_s=300 s; success and reward do not "
        "include them"
    )
    assert solved_share(found) == pytest.approx(1 / 4), "what the best checkpoint is chosen by"
    assert found["val-core/coins/n"] == 4
    assert found["val-core/coins/random"] == 0.25
    assert "val-core/coins/optimal" not in found
    assert headline(found) == 1 / 3
    assert evaluated.num_tokens == 0, "these attempts have no turns"


def test_greedy_only():
    parts = parts_of()
    found = asyncio.run(evaluate(parts, 0, samples=0, players=None)).metrics
    assert len(parts.sampler.asked) == 1
    assert not [key for key in found if "sampled" in key or key.endswith("/random")]


@pytest.mark.parametrize("played", [["solver"], ["solver", "proposer"]])
def test_an_agent_that_plays_alone_has_no_second_table(played):
    parts = parts_of()
    agents = {"solver": NamedAgentSection(), "proposer": NamedAgentSection(weights_of="solver")}
    parts.config = parts.config.model_copy(update={"agents": agents})
    alone = parts.sampler.sample

    async def sample(tasks, **arguments):
        found = await alone(tasks, **arguments)
        return [
            msgspec.structs.replace(one, group_id=f"{one.group_id}:{agent}")
            for agent in played
            for one in found
        ]

    parts.sampler.sample = sample
    found = asyncio.run(evaluate(parts, 0, samples=0, players=None)).metrics
    tables = {
        evaluated.environment: evaluated.success_greedy for evaluated in read_evaluations(found)
    }
    both = {"coins:solver": 1 / 3, "coins:proposer": 1 / 3}
    assert tables == {"coins": 1 / 3} | (both if len(played) > 1 else {})


def test_where_every_attempt_failed_there_is_neither_success_nor_reward():
    parts = parts_of()
    parts.tasks = SimpleNamespace(held_out=lambda: TASKS[3:])
    found = asyncio.run(evaluate(parts, 0, samples=0, players=None)).metrics
    assert found["val-aux/coins/failed/greedy"] == 1.0
    assert not {"val-core/coins/reward/greedy", "val-core/coins/success/greedy"} & found.keys()
    assert (headline(found), solved_share(found)) == (None, 0.0)


def test_reference_players_play_the_held_out_tasks_under_the_agents_limits():
    parts = parts_of(environment={"type": "frozen_lake", "max_actions": 20}, agent={"max_turns": 3})
    players = reference_players(parts)

    environment = make(parts.config.environment.model_copy(update={"max_actions": 3}))
    expected = []
    for task in TASKS:
        environment.reset(seed=task.seed)
        expected.append(environment.baselines(3))

    assert players.random == pytest.approx(sum(one.random for one in expected) / 4)
    assert players.optimal == pytest.approx(sum(one.optimal for one in expected) / 4)
    assert players.optimal < 0.9, "three actions are not enough for most maps"


def test_an_agent_function_has_no_reference_players():
    assert (
        reference_players(SimpleNamespace(config=build_config({}, needs_environment=False))) is None
    )


class Broken(TextEnvironment):
    instructions = ""

    def reset(self, *, seed=None, options=None):
        raise KeyboardInterrupt

    def step(self, action):
        raise NotImplementedError


def test_reference_players_of_an_environment_that_breaks_are_unknown(monkeypatch):
    parts = parts_of()
    notes = []
    parts.note = notes.append
    monkeypatch.setattr("agentevo.runs.orchestration.players.make", Broken)
    monkeypatch.setattr("agentevo.environments.make", Broken)
    assert reference_players(parts) is None
    assert "KeyboardInterrupt" in notes[0] and "is unknown" in notes[0]


@pytest.mark.parametrize(
    ("sections", "meaning"),
    [
        ({}, ""),
        ({"environment": None, "agent": {"type": "single_turn"}}, "a reward of 1 or more"),
        (
            {"environment": None, "agent": {"type": "single_turn"}, "rewards": ["exact_match"]},
            "a score of 1 or more by exact_match",
        ),
    ],
)
def test_what_success_means_is_said_where_an_agent_is_graded(sections, meaning):
    tree = {"environment": {"type": "coins"}} | sections
    config = build_config(tree, needs_environment=False)
    assert meaning in meaning_of_success(config)
    assert bool(meaning) == bool(meaning_of_success(config))


def test_what_success_means_is_said_once_a_run():
    tree = {"agent": {"type": "single_turn"}}
    config = build_config(tree, needs_environment=False)
    evaluated = Evaluated({}, 0, 2, ["broken", "broken"])
    first, later = evaluated.notes(config), evaluated.notes(config, is_first=False)
    assert first == [*later, meaning_of_success(config)] and len(later) == 1
