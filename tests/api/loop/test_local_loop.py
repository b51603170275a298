"""A program's own loop trains a model in its process, by the same trainer as `agentevo.train`."""

from __future__ import annotations

import asyncio
import os

import httpx
import msgspec
import pytest

import agentevo
from agentevo.api.loop.records import SealError
from agentevo.errors import AttemptsFailedError, BadRequestError, ConfigError
from agentevo.observability import read_metrics

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}
TASKS = [{"id": str(n), "query": f"Say a{n}."} for n in range(3)]
SECTIONS = {
    "model": TINY,
    "sampling": {"max_new_tokens": 4},
    "trainer": {"group_size": 4, "learning_rate": 1e-2, "warmup_steps": 0},
    "tracking": {"report": False, "tensorboard": False},
}


def reward_of(text: str) -> float:
    return sum(character in "abcdefgh" for character in text) / 4


@agentevo.rollout
async def answer(task, policy):
    """Two turns."""
    messages = [{"role": "user", "content": task.query}]
    first = await policy.generate(messages)
    messages += [first.message, {"role": "user", "content": "Again."}]
    second = await policy.generate(messages, sampling={"max_new_tokens": 2})
    return reward_of(first.text + second.text)


@agentevo.rollout
def by_a_client(task):
    """The same by a client of its own, not async."""

    def ask(messages, **options):
        response = httpx.post(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json={"model": "policy", "messages": messages, **options},
            timeout=300,
        )
        return response.raise_for_status().json()["choices"][0]["message"]

    messages = [{"role": "user", "content": task.query}]
    first = ask(messages)
    second = ask([*messages, first, {"role": "user", "content": "Again."}], max_tokens=2)
    return reward_of(first["content"] + second["content"])


def loop(folder, work, **sections):
    """Runs `work(model)`."""

    async def opened():
        async with agentevo.open_model(folder, **SECTIONS | sections) as model:
            return await work(model)

    return asyncio.run(opened())


def steps_of(run, keys=("critic/score/mean", "actor/grad_norm", "actor/pg_loss")):
    """The numbers of every step, and what was said in it."""
    rows = [row for row in read_metrics(run.dir / "metrics.jsonl") if keys[0] in row]
    texts = sorted(
        (trajectory.id, tuple(tuple(turn.completion_ids) for turn in trajectory.turns))
        for trajectory in run.trajectories(split="train")
    )
    return [[row[key] for key in keys] for row in rows], texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return agentevo.train(
        answer,
        [*TASKS, {"id": "held out", "query": "Say b."}],
        **SECTIONS | {"trainer": SECTIONS["trainer"] | {"steps": 2, "groups_per_step": 2}},
        evaluation={"tasks": 1, "samples": 0},
        run={"dir": tmp_path_factory.mktemp("trained") / "run"},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [answer, pytest.param(by_a_client, marks=pytest.mark.soak)],
    ids=["native", "client"],
)
def test_a_loop_equals_train(function, trained, tmp_path):
    """The same tasks in the same order: the same tokens, rewards and gradients."""
    order = [
        [trajectory.task_id for trajectory in trained.trajectories(split="train", step=step)][::4]
        for step in (1, 2)
    ]

    async def work(model):
        by_id = {task["id"]: task for task in TASKS}
        for step, ids in enumerate(order, start=1):
            groups = await agentevo.gather(function.group(model, by_id[name]) for name in ids)
            assert (await model.train(groups)).step == step == model.step

    loop(tmp_path / "looped", work)
    looped = agentevo.load_run(tmp_path / "looped")
    assert steps_of(looped) == steps_of(trained)
    assert looped.audit().ok


@pytest.mark.slow
def test_a_loop_raises_the_reward_and_goes_on_where_it_was(tmp_path):
    async def steps(model, until, rewards):
        while model.step < until:
            groups = await agentevo.gather(answer.group(model, task, size=8) for task in TASKS)
            rewards.append((await model.train(groups)).reward)
        return groups

    rewards: list[float] = []
    folder = tmp_path / "run"
    kept = loop(folder, lambda model: steps(model, 6, rewards))

    async def again(model):
        assert model.step == 6
        before = await model.train(kept)  # its answer was lost, say
        assert (before.step, model.step) == (6, 6)
        await steps(model, 10, rewards)
        assert [one.step for one in await model.checkpoints()] == [6, 10]
        copied = await model.fetch(tmp_path / "copy")
        assert (copied / "model.safetensors").stat().st_size > 0

    loop(folder, again)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2

    run = agentevo.load_run(folder)
    assert run.audit().ok
    assert run.summary["steps"] == 10

    with pytest.raises(ConfigError, match="a program's own loop"):
        agentevo.train("coins", resume=True, run={"dir": folder})


@agentevo.rollout
async def flaky(task, policy):
    reply = await policy.generate([{"role": "user", "content": task.query}])
    if policy.name.endswith("#1"):
        raise ValueError("bad luck")
    if policy.name.endswith("#2"):
        return None
    return reward_of(reply.text) + 0.01 * policy.turns[0].completion_ids[0]


@pytest.mark.slow
def test_what_is_refused_and_what_is_left_out(tmp_path, capsys):
    async def work(model):
        (group,) = await agentevo.gather([flaky.group(model, TASKS[0], size=5)])
        assert [trajectory.status for trajectory in group.trajectories] == [
            "completed", "failed", "failed", "completed", "completed",
        ]  # fmt: skip

        errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
        assert errors[0] == "ValueError: bad luck"
        assert errors[1].startswith("the agent returned no reward")
        assert "bad luck" in capsys.readouterr().err

        turns = group.trajectories[0].turns
        forged = msgspec.structs.replace(turns[0], completion_ids=[5] * len(turns[0].logprobs))
        wrong = msgspec.structs.replace(group.trajectories[0], turns=[forged])
        other = msgspec.structs.replace(group, trajectories=[wrong, *group.trajectories[1:]])
        with pytest.raises(SealError, match="is not what this run's engine sampled"):
            await model.train([other])
        with pytest.raises(SealError):
            await model.train([msgspec.structs.replace(group, seals={})])
        with pytest.raises(ConfigError, match="at least one"):
            await model.train([])
        with pytest.raises(ConfigError, match="appears twice"):
            await model.train([group, group])

        greedy = await answer.group(model, TASKS[0], greedy=True)
        with pytest.raises(ConfigError, match="only for evaluation"):
            await model.train([greedy])
        with pytest.raises(ConfigError, match="no attempt has completed"):
            await model.train([group.without(*(one.id for one in group.completed))])
        with pytest.raises(ConfigError, match="give a reward for each"):
            group.with_rewards([1.0])
        with pytest.raises(BadRequestError):
            agentevo.Group.decode(b"{}")

        copied = agentevo.Group.decode(group.encode())
        assert copied == group

        judged = copied.with_rewards([1.0, 0.0, 0.0, 0.5, 0.25])
        old = await agentevo.gather([answer.group(model, TASKS[1])])
        trained = await model.train([judged])
        assert trained.dropped == {f"{group.id}#1": "failed", f"{group.id}#2": "failed"}
        assert trained.reward == pytest.approx((1.0 + 0.5 + 0.25) / 3)

        with pytest.raises(ConfigError, match="no attempt is trained on twice"):
            await model.train([group])  # with other rewards, it is another submission

        changed = await answer.group(model, {**TASKS[0], "query": "Say b."}, size=2)
        with pytest.raises(ConfigError, match="its own id"):
            await model.train([changed])

        stale = await model.train(old)
        assert set(stale.dropped.values()) == {"stale"}
        assert (stale.step, model.step) == (2, 2)

    loop(tmp_path / "run", work)
    assert agentevo.load_run(tmp_path / "run").audit().ok


@pytest.mark.slow
def test_staleness_that_is_allowed_is_trained_on(tmp_path):
    async def work(model):
        first, second, third = [
            await agentevo.gather([answer.group(model, task)]) for task in TASKS
        ]
        trained = [
            await model.train([group.with_rewards([0.0, 0.3, 0.6, 0.9])])
            for (group,) in (first, second, third)
        ]
        assert [set(one.dropped.values()) for one in trained] == [set(), set(), {"stale"}]

    loop(tmp_path / "run", work, rollout={"staleness": 1, "policy": "cancel"})
    assert agentevo.load_run(tmp_path / "run").audit().ok


@agentevo.rollout
async def broken(task, policy):
    raise RuntimeError("no tool")


@pytest.mark.slow
def test_a_broken_rollout_is_said_at_once(tmp_path):
    async def work(model):
        with pytest.raises(AttemptsFailedError, match="4 of 4 failed: 4 RuntimeError: no tool"):
            await agentevo.gather([broken.group(model, TASKS[0])])

    loop(tmp_path / "run", work)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"environment": {"type": "coins"}}, "environment: the program plays"),
        ({"rollout": {"samplers": 1}}, "rollout.samplers"),
        ({"algorithm": {"replay_successes": 1}}, "algorithm.replay_successes: the program chooses"),
        (
            {"algorithm": "remax", "agents": {"solver": {}}},
            "algorithm.name=remax: not supported in a run",
        ),
        ({"trainer": {"stepps": 3}}, "steps"),
    ],
)
def test_what_no_loop_can_be_trained_by_creates_nothing(sections, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        loop(tmp_path / "run", None, **sections)
    assert not (tmp_path / "run").exists()
