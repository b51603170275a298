"""Several agents, scorers, baselines, forms of answers and remote models in a program's own loop,
in this process and by a client of a server: the same tokens and gradients as `agentevo.train`."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from loop_server import served
from remote_server import RemoteServer, chat, gives
from slow import soak
from watched_policies import Policies

import agentevo
from agentevo.api.loop.records import NewAttempt
from agentevo.errors import BadRequestError, ConfigError
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.observability import read_metrics

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}
TASKS = [{"id": str(n), "query": f"Say a{n}.", "answer": "a"} for n in range(3)]
SECTIONS = {
    "model": TINY,
    "sampling": {"max_new_tokens": 4},
    "trainer": {"group_size": 3, "learning_rate": 1e-2, "warmup_steps": 0},
    "tracking": {"report": False, "tensorboard": False},
}
AGENTS = {
    "critic": {"train": False},
    "solver": {},
    "writer": {},
    "rival": {"weights_of": "solver", "lag": 1},
}


def low(text):
    """The share of a text's characters that come before "m"."""
    return sum(c < "m" for c in text) / max(len(text), 1)


@agentevo.rollout
async def debate(task, agents):
    """Each is to write other characters than the one before it; the scorers judge the writer."""
    said = task.query
    rewards = {}
    for number, name in enumerate(agents.agents):
        reply = await agents[name].generate([{"role": "user", "content": said}])
        said = reply.text
        if name != "writer":
            rewards[name] = low(said) if number % 2 else 1 - low(said)

    return rewards


@agentevo.rollout
async def alone(task, policy):
    await policy.generate([{"role": "user", "content": task.query}])


def lowness(completion):
    return low(completion)


def rewarded_by_metrics(rows):
    return [row for row in rows if "critic/score/mean" in row]


def what_was_trained(folder):
    """Losses, rewards and gradients of every agent in every step, and all tokens."""
    keep = ("critic/score", "grad_norm", "pg_loss", "rollout/dropped", "reward_parts", "baseline")
    rows = [
        {key: value for key, value in row.items() if any(part in key for part in keep)}
        for row in rewarded_by_metrics(read_metrics(folder / "metrics.jsonl"))
    ]
    run = agentevo.load_run(folder)
    audit = run.audit()
    assert audit.ok, audit

    texts = sorted(
        (
            trajectory.id,
            [(list(turn.completion_ids), list(turn.versions)) for turn in trajectory.turns],
        )
        for trajectory in run.trajectories(split="train")
    )
    assert rows and texts
    return rows, texts


def order_of(run, steps):
    """The tasks of each step."""
    return [
        list(
            dict.fromkeys(
                trajectory.task_id for trajectory in run.trajectories(split="train", step=step)
            )
        )
        for step in range(1, steps + 1)
    ]


@asynccontextmanager
async def opened(where, folder, **sections):
    """A model in this process, or of a server behind a client."""
    if where == "here":
        async with agentevo.open_model(folder / "mine", **SECTIONS | sections) as model:
            yield model
    else:
        async with (
            served(folder) as (client, _, _),
            client.open_model("mine", **SECTIONS | sections) as model,
        ):
            yield model


def train(rollout, folder, **sections):
    trainer = SECTIONS["trainer"] | {"steps": 2, "groups_per_step": 2}
    return agentevo.train(
        rollout,
        [*TASKS, {"id": "held out", "query": "Say b.", "answer": "b"}],
        **SECTIONS | sections | {"trainer": trainer},
        evaluation={"tasks": 1, "samples": 0},
        run={"dir": folder},
    )


KINDS = {
    "agents": (debate, {"agents": AGENTS, "rewards": [lowness]}),
    "remax": (alone, {"algorithm": "remax", "rewards": [lowness]}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What agentevo.train makes of each kind, and the tasks of its steps; made once."""
    made = {}

    def of(kind):
        rollout, sections = KINDS[kind]
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "run"
            run = train(rollout, folder, **sections)
            made[kind] = what_was_trained(folder), order_of(run, 2)
        return made[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["here", *soak("server")])
def test_a_loop_equals_train(kind, where, trained, tmp_path):
    rollout, sections = KINDS[kind]
    expected, order = trained(kind)

    async def work():
        by_id = {task["id"]: task for task in TASKS}
        async with opened(where, tmp_path, **sections) as model:
            for step, ids in enumerate(order, start=1):
                groups = await agentevo.gather(rollout.group(model, by_id[name]) for name in ids)
                copied = [agentevo.Group.decode(group.encode()) for group in groups]
                assert copied == groups
                assert (await model.train(copied)).step == step

    asyncio.run(work())
    assert what_was_trained(tmp_path / "mine") == expected


@pytest.mark.slow
def test_only_the_chosen_agents_turns_move_only_its_own_weights(tmp_path, monkeypatch):
    policies = Policies(monkeypatch)
    agents = {"solver": {}, "writer": {}, "critic": {"train": False}}

    async def work():
        async with opened("here", tmp_path, agents=agents) as model:
            assert (model.state.agents, model.state.trained_agents) == (
                ["solver", "writer", "critic"],
                ["solver", "writer"],
            )

            group, other = await agentevo.gather(both.group(model, task) for task in TASKS[:2])
            assert group.agents == ["solver", "writer", "critic"]

            judged = group.of("writer").with_rewards([0.0, 0.5, 1.0])
            trained = await model.train([judged])
            assert (trained.dropped, policies.agents_moved()) == ({}, {"writer"})
            assert "agents/writer/actor/grad_norm" in trained.metrics
            assert "actor/grad_norm" not in trained.metrics

            stale = await model.train([other])
            assert set(stale.dropped.values()) == {"stale", "not-trained"}

            (group,) = await agentevo.gather([both.group(model, TASKS[2])])
            mixed = [
                trajectory for trajectory in group.trajectories if trajectory.agent == "writer"
            ]
            named = msgspec.structs.replace(mixed[0], group_id=f"{group.id}:solver")
            for wrong in (named, msgspec.structs.replace(mixed[0], group_id=group.id)):
                forged = msgspec.structs.replace(group, trajectories=[wrong])
                with pytest.raises(agentevo.AgentEvoError, match="is not what this run's engine"):
                    await model.train([forged])

            spread = [0.0, 0.5, 1.0] * 3
            trained = await model.train([group.with_rewards(spread)])
            assert set(trained.dropped.values()) == {"not-trained"}
            assert policies.agents_moved() == {"solver", "writer"}

            with pytest.raises(ConfigError, match="'judge' is not an agent of the group"):
                group.of("judge")

    asyncio.run(work())
    assert agentevo.load_run(tmp_path / "mine").audit().ok


@agentevo.rollout
async def both(task, agents):
    for name in agents.agents:
        await agents[name].generate([{"role": "user", "content": task.query}])
    return 0.0


@agentevo.rollout
def by_a_client(task, policy):
    """Names the agent as its model, or asks at the agent's own address."""

    def ask(model, at):
        answer = httpx.post(
            f"{at.base_url}/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": task.query}]},
            headers={"authorization": f"Bearer {at.api_key}"},
            timeout=300,
        )
        return answer.json() if answer.is_error else answer.json()["choices"][0]["message"]

    assert "there is no agent 'gpt-4o'" in ask("gpt-4o", policy)["error"]["message"]

    said = [ask("solver", policy), ask("critic", policy), ask("gpt-4o", policy["critic"])]
    assert all(one["content"] is not None for one in said)

    posted = {"reward": 0.5, "agent": "solver", "turn": 0}
    assert httpx.post(policy.session.reward_url, json=posted).is_success
    return {"solver": 1.0, "critic": [0.0, 1.0]}


@pytest.mark.slow
def test_a_client_of_its_own_names_the_agent(tmp_path):
    async def work():
        agents = {"solver": {}, "critic": {"train": False}}
        async with opened("here", tmp_path, agents=agents) as model:
            (group,) = await agentevo.gather([by_a_client.group(model, TASKS[0], size=2)])
            assert [trajectory.agent for trajectory in group.trajectories] == ["solver"] * 2 + [
                "critic"
            ] * 2
            turns = [
                [turn.reward for turn in trajectory.turns] for trajectory in group.trajectories
            ]
            assert turns == [[0.0]] * 2 + [[0.0, 1.0]] * 2

    asyncio.run(work())


@agentevo.rollout
async def taught(task, policy):
    asked = [{"role": "user", "content": task.query}]
    own = await policy["solver"].generate(asked)
    hint = await policy.model("teacher").generate(asked)
    said = await policy["judge"].generate([*asked, own.message, *asked])
    return {"solver": low(own.text) + len(hint.text + said.text)}


@agentevo.rollout
async def by_its_name(task, policy):
    await policy["solver"].generate([{"role": "user", "content": task.query}])
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{policy.base_url}/chat/completions",
            json={"model": "teacher", "messages": [{"role": "user", "content": task.query}]},
            headers={"authorization": f"Bearer {policy.api_key}"},
            timeout=300,
        )

    return {"solver": float(answer.status_code)}


async def refusal(model, name):
    """What the server's gateway answers to a client of the attempt that names this model."""
    new = NewAttempt(task_id="0", group_id="0/train@9", number=0)
    opened = await model.connection.open(new)
    answer = await model.connection._client.http.post(
        "/v1/chat/completions",
        json={"model": name, "messages": [{"role": "user", "content": "1"}]},
        headers={"Authorization": f"Bearer {opened.keys['']}"},
    )
    assert answer.status_code == 400
    return answer.text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "server"])
def test_remote_models_are_asked_by_the_program(where, tmp_path, monkeypatch):
    monkeypatch.setenv("REMOTE_KEY", "sk-secret")

    async def work(base_url):
        teacher = {"base_url": base_url, "model": "m", "api_key": "${env:REMOTE_KEY}"}
        agents = {"solver": {}, "judge": {"remote": "teacher"}}
        remote = {"teacher": teacher}
        async with opened(where, tmp_path, agents=agents, remote_models=remote) as model:
            (group,) = await agentevo.gather([taught.group(model, TASKS[0], size=2)])
            for one in group.trajectories:
                assert one.status == "completed", one.error
                assert 10.0 <= one.reward <= 11.0
                assert [turn.agent for turn in one.remote_turns] == ["", "judge"]
                assert one.metrics["num_remote_turns"] == 2.0

            assert (await model.train([group])).dropped == {}
            if where == "server":  # whose gateway does not pass the policy off as the teacher
                assert "is a remote model of the program" in await refusal(model, "teacher")
            else:
                (group,) = await agentevo.gather([by_its_name.group(model, TASKS[1], size=2)])
                assert group.rewards == [200.0] * 2
                assert [len(trajectory.remote_turns) for trajectory in group.trajectories] == [1, 1]

    with RemoteServer(gives(chat("right"))) as server:
        asyncio.run(work(server.base_url))
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-secret"}

    stored = agentevo.load_run(tmp_path / "mine").trajectories(state="committed")
    assert {turn.messages[-1].text for one in stored for turn in one.remote_turns} == {"right"}

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"sk-secret" in path.read_bytes()] == []


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@agentevo.rollout
async def in_a_form(task, policy):
    form = AnswerForm(schema=SCHEMA)
    asked = [{"role": "user", "content": task.query}]
    reply = await policy.generate(asked, form=form, sampling={"max_new_tokens": 30})
    with pytest.raises(BadRequestError, match="no tools"):
        await policy.generate(asked, form=AnswerForm(calls="required"))
    return json.loads(reply.text)["a"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "server"])
def test_an_answer_has_the_form_that_was_asked_for(where, tmp_path):
    pytest.importorskip("llguidance")

    async def work():
        async with opened(where, tmp_path) as model:
            (group,) = await agentevo.gather([in_a_form.group(model, TASKS[0])])
            assert [trajectory.error for trajectory in group.trajectories] == [None] * 3
            assert (await model.train([group.with_rewards([0.0, 0.5, 1.0])])).dropped == {}

    asyncio.run(work())
    assert agentevo.load_run(tmp_path / "mine").audit().ok


@pytest.mark.slow
def test_what_a_program_can_not_say(tmp_path):
    async def client(**sections):
        async with opened("server", tmp_path, **sections):
            pass

    for sections, message in (
        ({"rewards": [object()]}, "has no name"),
        ({"rewards": ["nonsense"]}, "'nonsense'"),
        ({"remote_models": {"teacher": {}}}, "remote_models.teacher.model"),
        ({"remote_models": {"t": {"model": "m", "cache": True}}}, "cache: answers are kept"),
        ({"agents": {"a": {}, "b": {"remote": "t"}}}, "'t' is not in remote_models"),
        (
            {"agents": {"t": {}}, "remote_models": {"t": {"model": "m"}}},
            "'t' is also the name of a remote model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(client(**sections))

    assert not (tmp_path / "mine").exists()

    async def twice():
        async with opened("here", tmp_path, algorithm="remax") as model:
            groups = await agentevo.gather(answered.group(model, TASKS[0]) for _ in range(2))
            assert all(group.baseline is not None for group in groups)
            with pytest.raises(ConfigError, match="each with a baseline"):
                await model.train(groups)
            without = groups[0].without(groups[0].baseline.id)
            trained = await model.train([without])
            assert set(trained.dropped.values()) == {"no-baseline"}

    asyncio.run(twice())


@agentevo.rollout
async def answered(task, policy):
    reply = await policy.generate([{"role": "user", "content": task.query}])
    return low(reply.text)


@pytest.mark.slow
def test_groups_may_be_gathered_while_a_step_is_trained(tmp_path):
    """The engines of all that is trained sleep meanwhile, and what is too old is left out."""

    async def work():
        rollout = {"staleness": 1, "policy": "cancel"}
        async with opened("here", tmp_path, agents=AGENTS, rollout=rollout) as model:
            (group,), (oldest,) = [
                await agentevo.gather([both.group(model, task)]) for task in TASKS[:2]
            ]
            for _ in range(3):
                trained, (ahead,) = await asyncio.gather(
                    model.train([group.with_rewards([0.0, 0.5, 1.0] * len(AGENTS))]),
                    agentevo.gather([both.group(model, TASKS[2])]),
                )
                assert set(trained.dropped.values()) == {"not-trained"}
                group = ahead

            stale = await model.train([oldest])
            assert set(stale.dropped.values()) == {"stale", "not-trained"}

    asyncio.run(work())
    assert agentevo.load_run(tmp_path / "mine").audit().ok
