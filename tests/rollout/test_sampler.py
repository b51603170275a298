"""The sampler: groups at once, every attempt recorded, and whatever goes wrong costs one attempt
and never the run."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from agentevo.agents import Outcome
from agentevo.config import build_config
from agentevo.config.rollout import RolloutSection
from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    EnvironmentFailure,
    StoreError,
)
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.rollout.sampler import Sampler
from agentevo.runs.orchestration.components import open_components
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.opening import open_store
from agentevo.store.records import RetryPolicy
from agentevo.training.trainer import Trainer
from agentevo.types import Message, Task

TASKS = [Task(id="one", query="left"), Task(id="two", query="right")]


class Asker:
    """Says the task's query twice; then does what the test wants of this attempt."""

    def __init__(self, then=None) -> None:
        self._then = then

    async def run(self, task, policy):
        messages = [Message("user", task.query)]
        reply = await policy.generate(messages)
        await policy.generate([*messages, reply.message, Message("user", "Go on.")])
        if self._then is not None:
            result = self._then(task, policy)
            if asyncio.iscoroutine(result):
                await result

        return Outcome(
            reward=1.5,
            reward_parts={"asked": 2.0, "late": -0.5},
            success=True,
            turn_rewards={0: 0.5, 1: 1.0},
            truncated=True,
            metrics={"num_actions": 2.0},
        )


@pytest.fixture
def sample(tiny_policy, scripted_engine, tmp_path):
    """`sample(agent, says, **arguments)` -> trajectories, stored ones, engine, counts of the
    store. agent_s: the deadline of an episode."""
    loaded = tiny_policy()
    chat = ChatFormat(loaded.tokenizer)
    base = build_config(
        {
            "engine": {"timeout_s": 300},
            "sampling": {"max_new_tokens": 9, "stop": ["zz"]},
            "run": {"seed": 4},
        },
        needs_environment=False,
    )

    def run(agent, says, *, store="store", rollout=None, agent_s=300.0, **arguments):
        sections = {
            "rollout": RolloutSection(**(rollout or {})),
            "agent": base.agent.model_copy(update={"timeout_s": agent_s}),
        }
        config = base.model_copy(update=sections)
        arguments = {
            "attempts": 2,
            "temperature": 0.8,
            "split": "train",
            "step": 3,
            "label": "train",
        } | arguments
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, says)

        async def work():
            async with await open_store(f"sqlite:///{tmp_path / store}") as opened:
                found = await Sampler(config, engine, chat, agent, opened, 256).sample(
                    TASKS, **arguments
                )
                stored = [
                    trajectory async for trajectory in opened.trajectories(step=arguments["step"])
                ]
                return found, stored, engine, await opened.counts()

        return run_coroutine(work())

    return run


def test_every_attempt_of_every_task_in_order(sample):
    found, stored, engine, counts = sample(
        Asker(), ["left", "Up", "red", "blue", "green", "black", "white", "coin"]
    )
    assert [(t.task_id, t.attempt, t.group_id) for t in found] == [
        ("one", 0, "one/train@3"),
        ("one", 1, "one/train@3"),
        ("two", 0, "two/train@3"),
        ("two", 1, "two/train@3"),
    ]
    assert len({t.id for t in found}) == 4

    for trajectory in found:
        assert (trajectory.reward, trajectory.success, trajectory.truncated, trajectory.status) == (
            1.5,
            True,
            True,
            "completed",
        )
        assert [turn.reward for turn in trajectory.turns] == [0.5, 1.0]
        assert trajectory.metrics == {"num_actions": 2.0}
        assert trajectory.reward_parts == {"asked": 2.0, "late": -0.5}

    assert sorted(engine.released) == sorted(t.id for t in found)

    by_id = {one.trajectory.id: one for one in stored}
    assert {(one.split, one.step, one.state) for one in stored} == {("train", 3, "ready")}
    assert all(by_id[t.id].trajectory.turns == t.turns for t in found)
    assert counts["tasks/completed"] == 2


def test_requests_carry_the_recipes_sampling_and_seeds_of_their_own(sample):
    _, _, engine, _ = sample(Asker(), ["left"] * 8)
    params = [sampling for _, sampling, _ in engine.requests]
    assert {(p.temperature, p.max_new_tokens, p.stop_strings) for p in params} == {
        (0.8, 9, ("zz",))
    }
    assert all(p.stop_token_ids for p in params)
    assert len({p.seed for p in params}) == 8


@pytest.mark.slow
def test_seeds_follow_run_task_attempt_step_and_pass(sample):
    def seeds(**arguments):
        return {
            sampling.seed
            for _, sampling, _ in sample(Asker(), ["left"] * 8, **arguments)[2].requests
        }

    assert seeds() == seeds(store="another")
    others = [seeds(step=4), seeds(label="greedy"), seeds(step=5, label="greedy")]
    assert len(set().union(seeds(store="third"), *others)) == 32


@pytest.mark.slow
def test_a_greedy_attempt_beside_each_group(sample):
    found, stored, engine, counts = sample(Asker(), ["left"] * 12, baseline=True)
    assert [(t.task_id, t.attempt, t.group_id) for t in found] == [
        ("one", 0, "one/train@3"),
        ("one", 1, "one/train@3"),
        ("one", 0, "one/baseline@3"),
        ("two", 0, "two/train@3"),
        ("two", 1, "two/train@3"),
        ("two", 0, "two/baseline@3"),
    ]

    by_attempt = {session: sampling.temperature for _, sampling, session in engine.requests}
    assert by_attempt == {t.id: 0.0 if "baseline" in t.id else 0.8 for t in found}
    assert [session for *_, session in engine.requests[:6]] == [t.id for t in found], (
        "all start together"
    )
    assert {one.trajectory.id for one in stored} == {t.id for t in found}
    assert counts["tasks/completed"] == 2

    alone = sample(Asker(), ["left"] * 8, step=9)[2]
    beside = sample(Asker(), ["left"] * 12, step=9, label="again", baseline=True)[2]
    assert len(beside.requests) == len(alone.requests) + 4


def failing(attempt: int, error):
    """Raises in one attempt of task `one` only."""

    def then(task, policy):
        if task.id == "one" and policy.name.endswith(f"#{attempt}"):
            raise error

    return then


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such move"), "ValueError: no such move"),
        (EnvironmentFailure("environment gone"), "EnvironmentFailure: environment gone"),
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError: "),
        (
            DeadlineExceededError("no completion within 7 s"),
            "DeadlineExceededError: no completion within 7 s",
        ),
        (TimeoutError("the tool took too long"), "TimeoutError: the tool took too long"),
        (SystemExit(3), "SystemExit(3): an agent can't end the process that it runs in"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_agent_that_fails_costs_its_own_attempt_only(error, reason, sample):
    found, stored, _, counts = sample(Asker(failing(1, error)), ["left"] * 8)
    assert [t.status for t in found] == ["completed", "failed", "completed", "completed"]

    failed = found[1]
    assert reason in failed.error
    assert (failed.reward, failed.success) == (0.0, False)
    assert len(failed.turns) == 2, "what it had said until then is on record"
    assert next(one for one in stored if one.trajectory.id == failed.id).state == "failed"
    assert counts["tasks/completed"] == 2


@pytest.mark.parametrize(
    "error",
    [DeadlineExceededError("no completion within 7 s"), EngineError("the engine's step failed")],
    ids=repr,
)
def test_an_engine_that_fails_costs_nobody_an_attempt(error, sample, monkeypatch):
    """The group in which it happened is begun again, whatever its agent makes of it."""
    monkeypatch.setattr("agentevo.rollout.sampler.RETRIES", RetryPolicy(first_delay_s=0.01))
    found, stored, engine, _ = sample(Asker(), ["left", error, *["left"] * 20])
    assert (
        [t.status for t in found] == [one.trajectory.status for one in stored] == ["completed"] * 4
    )
    assert [len(t.turns) for t in found] == [2] * 4
    assert 8 < len(engine.requests) <= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            DeadlineExceededError("no completion within 7 s: raise engine.timeout_s"),
            r"\w+/eval@3#\d: DeadlineExceededError: no completion within 7 s: raise engine\.",
        ),
        (
            EngineError("the engine's step failed: OutOfMemoryError"),
            r"OutOfMemoryError; if memory is short, lower engine\.kv_cache_gb or engine\.max_run",
        ),
    ],
    ids=["late", "broken"],
)
def test_an_engine_that_always_fails_ends_the_pass_and_nothing_is_made_up(
    error, told, sample, monkeypatch
):
    monkeypatch.setattr("agentevo.rollout.sampler.RETRIES", RetryPolicy(first_delay_s=0.01))
    with pytest.raises(EngineError, match=rf"^failed 5 times, last with: .*{told}"):
        sample(Asker(), [error] * 99, label="eval", split="eval")
    _, stored, *_ = sample(Asker(), ["left"] * 8, label="other", split="eval")
    assert len(stored) == 4, "of the first pass there is nothing"


def test_an_episode_that_hangs_is_ended_at_its_deadline(sample, monkeypatch):
    """The clock stands still until the others have ended."""
    now = [0.0]
    ended = []
    clock = SimpleNamespace(time=time.time, perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr("agentevo.rollout.group.time", clock)

    async def hang():
        while len(ended) < 3:
            await asyncio.sleep(0)
        now[0] += 1.0
        await asyncio.sleep(3600)

    def then(task, policy):
        if task.id == "two" and policy.name.endswith("#0"):
            return hang()
        return ended.append(policy.name)

    found, *_ = sample(Asker(then), ["left"] * 8, agent_s=0.05)
    assert [t.status for t in found] == ["completed", "completed", "failed", "completed"]
    assert found[2].error == "the episode took longer than agent.timeout_s=0.05 s"
    assert found[2].duration_s == 1.0


@pytest.mark.slow
def test_a_group_that_is_in_the_store_is_read_and_not_sampled_again(sample, tmp_path):
    before, *_ = sample(Asker(), ["left"] * 12, baseline=True)
    found, stored, engine, _ = sample(Asker(), ["right"] * 12, baseline=True)
    assert (found, engine.requests, len(stored)) == (before, [], 6)

    async def lose_a_group():
        async with await open_store(f"sqlite:///{tmp_path / 'store'}") as store:
            await store.rewind(0)
            await store.write_trajectories(
                [t for t in before if t.task_id == "two"], split="train", step=3
            )

    asyncio.run(lose_a_group())
    found, stored, engine, _ = sample(Asker(), ["Up"] * 6, baseline=True)
    assert found[3:] == before[3:], "what was written is what counts"
    assert [t.turns[0].messages[-1].content for t in found[:3]] == ["Up"] * 3
    assert len(engine.requests) == 6 and len(stored) == 6


@pytest.mark.slow
def test_a_larger_pass_over_groups_that_are_in_the_store_is_refused_where_it_differs(sample):
    sample(Asker(), ["left"] * 8)
    with pytest.raises(StoreError, match="other content"):
        sample(Asker(), ["right"] * 12, attempts=3)


@pytest.mark.slow
def test_the_first_attempts_to_complete_are_enough(sample):
    """Attempts 0 and 3 hang, 1 fails: of five begun, 2 and 4 complete, and the others are broken
    off with what they have said."""

    def then(task, policy):
        number = policy.name[-1]
        if number == "1":
            raise ValueError("no")
        return asyncio.sleep(3600) if number in "03" else None

    found, stored, _, _ = sample(Asker(then), ["left"] * 20, rollout={"extra_attempts": 3})
    for place in (0, 5):
        group = found[place : place + 5]
        assert [t.status for t in group] == [
            "cancelled",
            "failed",
            "completed",
            "cancelled",
            "completed",
        ]
        assert {t.error for t in group if t.status == "cancelled"} == {
            "cut: 2 attempts of its group had completed"
        }
        assert [len(t.turns) for t in group] == [2] * 5
        assert {t.reward for t in group if t.status != "completed"} == {0.0}

    assert {one.trajectory.status: one.state for one in stored} == {
        "completed": "ready",
        "failed": "failed",
        "cancelled": "failed",
    }
    assert not any(
        t.status == "cancelled"
        for t in sample(
            Asker(), ["left"] * 8, store="e", split="eval", rollout={"extra_attempts": 3}
        )[0]
    )


@pytest.mark.slow
def test_engines_that_can_not_be_reached_are_waited_for(sample, monkeypatch):
    gone = EngineUnavailableError("no engine")
    monkeypatch.setattr("agentevo.rollout.sampler.RETRIES", RetryPolicy(first_delay_s=0.01))
    found, _, engine, counts = sample(Asker(), [gone, gone, *["left"] * 12])
    assert [t.status for t in found] == ["completed"] * 4
    assert len(engine.requests) == 10, "the group in which it happened was begun again"
    assert counts["trajectories/train/ready"] == 4

    with pytest.raises(
        EngineUnavailableError,
        match=r"failed 5 times, last with: \w+/train@3#\d: EngineUnavailableError: no engine",
    ):
        sample(Asker(), [gone] * 99, store="away")


@pytest.mark.slow
def test_on_policy_means_on_policy(tmp_path):
    """Real sampler, engine and trainer on one tiny policy, over turns: the trainer's log-probs are
    the engine's, so the ratio is 1."""
    config = build_config(
        {
            "environment": {"type": "frozen_lake"},
            "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
            "agent": {"format": "plain", "max_turns": 3},
            "sampling": {"max_new_tokens": 5, "temperature": 1.3},
            "trainer": {
                "group_size": 4,
                "groups_per_step": 3,
                "micro_batch_tokens": 600,
                "warmup_steps": 0,
            },
            "algorithm": {"drop_zero_variance": False},
            "run": {"dir": str(tmp_path), "seed": 1},
        }
    )

    async def work():
        async with open_components(config) as parts:
            trainer = Trainer(parts.model, config.trainer, config.algorithm)
            found = []
            for step in (1, 2):
                trajectories = await parts.sampler.sample(
                    parts.tasks.train(step),
                    attempts=4,
                    temperature=config.sampling.temperature,
                    split="train",
                    step=step,
                    label="train",
                )
                samples = trainer.prepare(trajectories).samples
                # rewards of a policy that knows nothing are all alike: make some up
                found.append(
                    (
                        samples,
                        trainer.step(
                            [_with_advantage(s, (-1.0) ** i) for i, s in enumerate(samples)]
                        ),
                    )
                )
                await parts.engine.publish(step)

            return found

    for step, (samples, metrics) in enumerate(asyncio.run(work())):
        assert abs(metrics["actor/ppo_kl_first"]) < 1e-5
        assert metrics["actor/logprob_diff_max"] < 1e-4
        assert metrics["actor/pg_clipfrac"] == 0.0
        assert {
            version
            for s in samples
            for version, m in zip(s.versions, s.loss_mask, strict=True)
            if m
        } == {step}
        assert {s.temperature for s in samples} == {1.3}
        assert any(sum(s.loss_mask) > 5 for s in samples), "several turns"


def _with_advantage(sample, advantage):
    from msgspec.structs import replace

    return replace(sample, advantages=[advantage] * sample.num_trained)
