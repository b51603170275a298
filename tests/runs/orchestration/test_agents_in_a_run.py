"""Several named agents in one run: who is trained, with whose weights each plays, and what the
store, a checkpoint, a resume, the audit and a replay say of it."""

from __future__ import annotations

import httpx
import openai
import pytest
import torch
from remote_server import RemoteServer, chat, gives
from safetensors.torch import load_file
from watched_policies import Policies

import agentevo
from agentevo.config import ModelSection, build_config
from agentevo.errors import ConfigError
from agentevo.models.files.load import load_model
from agentevo.models.files.save import save_model
from agentevo.observability import read_metrics
from agentevo.runs.doctor.diagnostics import check_recipe
from agentevo.runs.processes.gateway import run_gateway
from agentevo.runs.processes.learn import learn
from agentevo.runs.processes.sample import sample
from agentevo.runs.processes.serve import serve

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}
TASKS = [{"id": str(n), "query": f"{n}"} for n in range(4)]
SECTIONS = {
    "model": TINY,
    "sampling": {"max_new_tokens": 3},
    "trainer": {"steps": 3, "groups_per_step": 1, "group_size": 3, "learning_rate": 0.003},
    "evaluation": {"tasks": 1, "samples": 0},
    "checkpoint": {"every": 1, "keep_last": 5},
    "tracking": {"report": False, "tensorboard": False},
}
AGENTS = {
    "critic": {"train": False},
    "solver": {},
    "writer": {},
    "rival": {"weights_of": "solver", "lag": 1},
    "first": {"weights_of": "solver", "version": 1},
    "twin": {"weights_of": "solver"},
}


def low(text):
    """The share of a text's characters that come before "m"."""
    return sum(c < "m" for c in text) / max(len(text), 1)


async def play(task, agents):
    """Each is to write other characters than the one before it."""
    said = task.query
    rewards = {}
    for number, name in enumerate(agents.agents):
        reply = await agents[name].generate([{"role": "user", "content": said}])
        said = reply.text
        rewards[name] = low(said) if number % 2 else 1 - low(said)
    return rewards


@pytest.fixture
def policies(monkeypatch):
    return Policies(monkeypatch)


def run(folder, agents, agent=play, resume=False, **more):
    return agentevo.train(
        agent, TASKS, agents=agents, run={"dir": str(folder)}, resume=resume, **(SECTIONS | more)
    )


def step_of(trajectory):
    return int(trajectory.group_id.partition("@")[2].partition(":")[0])


@pytest.mark.slow
def test_each_agent_plays_with_its_own_weights_and_those_chosen_are_trained(tmp_path, policies):
    trained = run(tmp_path / "run", AGENTS)
    assert not policies.moved("critic")
    assert policies.moved("solver") and policies.moved("writer")

    stored = trained.trajectories(split="train")
    assert {one.agent for one in stored} == set(AGENTS)
    assert len({one.group_id for one in stored}) == 3 * len(AGENTS)

    versions = {name: {} for name in AGENTS}
    for one in stored:
        drawn = {version for turn in one.turns for version in turn.versions}
        versions[one.agent].setdefault(step_of(one), set()).update(drawn)

    assert versions["critic"] == {1: {0}, 2: {0}, 3: {0}}
    assert versions["rival"] == {1: {0}, 2: {0}, 3: {1}}
    assert versions["first"] == {1: {0}, 2: {1}, 3: {1}}

    for name in ("solver", "writer", "twin"):
        assert versions[name] == {1: {0}, 2: {1}, 3: {2}}

    audit = trained.audit()
    assert not audit.violations

    dropped = {name for names in audit.reasons["dropped"].values() for name in names}
    never = {one.id for one in stored if one.agent in ("critic", "rival", "first")}
    assert never <= dropped and audit.trained == len(stored) - len(dropped)

    logged = set().union(*read_metrics(trained.dir / "metrics.jsonl"))
    assert {f"agents/{name}/critic/score/mean" for name in AGENTS} <= logged
    assert {"actor/grad_norm", "agents/writer/actor/grad_norm"} <= logged

    folder = trained.checkpoint_path("last") / "agents"
    assert [path.name for path in folder.iterdir()] == ["writer"]

    saved = load_file(folder / "writer" / "model.safetensors")
    now = policies.weights("writer")
    assert saved and all(torch.equal(value, now[name]) for name, value in saved.items())

    for name in AGENTS:
        one = next(t for t in stored if t.agent == name and step_of(t) == 3)
        replay = trained.replay(one.id)
        assert replay.same and replay.tokens == one.num_completion_tokens() > 0, replay.line()
        others = ", ".join(other for other in AGENTS if other != name)
        assert f"its agent {name} plays with {others}" in replay.unplayed


def told(run):
    return [
        (t.id, t.reward, [(list(turn.completion_ids), list(turn.versions)) for turn in t.turns])
        for t in sorted(run.trajectories(split="train"), key=lambda one: one.id)
    ]


def losses(run):
    """Of every step and agent."""
    rows = [row for row in read_metrics(run.dir / "metrics.jsonl") if "actor/grad_norm" in row]
    return [
        {key: row[key] for key in row if key.endswith(("grad_norm", "pg_loss"))} for row in rows
    ]


ALL_AGES = {
    "critic": [0, 0, 0],
    "rival": [0, 0, 0],
    "first": [0, 0, 1],
    "solver": [0, 0, 1],
    "writer": [0, 0, 1],
    "twin": [0, 0, 1],
}
"""The version that each plays with in the steps 1 to 3 when attempts are one version old."""


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["turns", pytest.param("overlap", marks=pytest.mark.soak)])
def test_attempts_that_wait_for_the_trainer_are_of_one_version_each(tmp_path, policies, sharing):
    """Asynchronous in one process: every agent of a step's attempts plays with what it had at the
    oldest version that is allowed, whatever the clock says."""
    rollout = {"staleness": 1, "policy": "wait", "sharing": sharing}
    trained = run(tmp_path / "run", AGENTS, rollout=rollout)
    assert not policies.moved("critic")
    assert policies.moved("solver") and policies.moved("writer")

    versions = {name: [set(), set(), set()] for name in AGENTS}
    for one in trained.trajectories(split="train"):
        drawn = {version for turn in one.turns for version in turn.versions}
        versions[one.agent][step_of(one) - 1] |= drawn
    assert versions == {name: [{n} for n in numbers] for name, numbers in ALL_AGES.items()}

    audit = trained.audit()
    assert audit.ok, audit
    for name in AGENTS:
        one = next(
            t for t in trained.trajectories(split="train") if t.agent == name and step_of(t) == 3
        )
        replay = trained.replay(one.id)
        assert replay.same, replay.line()

    again = run(tmp_path / "again", AGENTS, rollout=rollout)
    assert told(again) == told(trained)
    assert losses(again) == losses(trained) and len(losses(again)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mask", pytest.param("cancel", marks=pytest.mark.soak)])
def test_groups_that_come_as_they_finish_have_all_their_agents(tmp_path, policies, policy):
    more = {"rollout": {"staleness": 2, "policy": policy}}
    more["trainer"] = SECTIONS["trainer"] | {"steps": 4, "groups_per_step": 2}
    trained = run(tmp_path / "run", AGENTS, **more)
    assert not policies.moved("critic")

    audit = trained.audit()
    assert audit.ok, audit

    of_group = {}
    for state in ("committed", "dropped"):
        for trajectory in trained.trajectories(state=state, split="train"):
            assert state == "dropped" or trajectory.agent in ("solver", "writer", "twin")
            of_group.setdefault(trajectory.group_id.rpartition(":")[0], set()).add(trajectory.agent)

    assert len(of_group) == 8
    assert all(agents == set(AGENTS) for agents in of_group.values())

    rows = [row for row in read_metrics(trained.dir / "metrics.jsonl") if "staleness/max" in row]
    assert rows and all(row["staleness/max"] <= 2 for row in rows)


@pytest.mark.soak
def test_a_resumed_asynchronous_run_trains_on_the_same(tmp_path):
    rollout = {"staleness": 1, "policy": "wait"}
    whole = run(tmp_path / "whole", AGENTS, rollout=rollout)
    trainer = SECTIONS["trainer"] | {"steps": 2}
    run(tmp_path / "run", AGENTS, trainer=trainer, rollout=rollout)

    resumed = run(tmp_path / "run", AGENTS, resume=True, rollout=rollout)
    assert [one[0] for one in told(resumed)] == [one[0] for one in told(whole)]
    assert losses(resumed)[:2] == losses(whole)[:2]
    assert resumed.audit().ok


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_its_opponents_too(tmp_path):
    whole = run(tmp_path / "whole", AGENTS)
    run(tmp_path / "run", AGENTS, trainer=SECTIONS["trainer"] | {"steps": 2})
    resumed = run(tmp_path / "run", AGENTS, resume=True)

    assert told(resumed) == told(whole)
    assert not resumed.audit().violations


@pytest.mark.slow
def test_a_client_names_the_agent_as_its_model(tmp_path):
    heard = {}

    def asks(task, policy):
        def ask(model, base=policy.base_url, key=policy.api_key):
            return httpx.post(
                f"{base}/chat/completions",
                json={"model": model, "messages": [{"role": "user", "content": task.query}]},
                headers={"authorization": f"Bearer {key}"},
                timeout=300,
            )

        models = httpx.get(
            f"{policy.base_url}/models", headers={"authorization": f"Bearer {policy.api_key}"}
        )
        heard["models"] = [model["id"] for model in models.json()["data"]]
        heard["unknown"] = ask("gpt-4o").status_code, ask("gpt-4o").json()["error"]["code"]
        assert ask("solver").status_code == ask("critic").status_code == 200

        own = policy["critic"]
        assert ask("gpt-4o", own.base_url, own.api_key).status_code == 200

        url = policy.session.reward_url
        posted = [
            httpx.post(url, json=body).status_code
            for body in (
                {"reward": 0.5, "agent": "critic", "turn": 1},
                {"reward": 0.25},
                {"reward": 1.0, "agent": "judge"},
                {"reward": 1.0, "turn": 0},
            )
        ]
        heard["posted"] = posted

        return {"solver": len(policy.session.posted), "critic": [0.0, 1.0]}

    agents = {"solver": {}, "critic": {"train": False}}
    trained = run(tmp_path / "run", agents, asks, trainer=SECTIONS["trainer"] | {"steps": 1})
    assert heard["models"] == ["solver", "critic"]
    assert heard["unknown"] == (404, "model_not_found")
    assert heard["posted"] == [200, 200, 400, 400]

    turns = {
        trajectory.agent: [turn.reward for turn in trajectory.turns]
        for trajectory in trained.trajectories(split="train")
    }
    assert turns == {"solver": [0.0], "critic": [0.0, 1.0]}


@pytest.mark.slow
def test_a_remote_model_plays_one_of_them(tmp_path):
    async def judged(task, policy):
        asked = [{"role": "user", "content": task.query}]
        own = await policy["solver"].generate(asked)
        said = await policy["judge"].generate([*asked, own.message, *asked])

        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            again = await client.chat.completions.create(model="judge", messages=asked)
            names = [model.id for model in (await client.models.list()).data]

        assert again.choices[0].message.content == said.text == "right"
        assert names == ["solver", "judge", "teacher"]
        assert policy.agents == ("solver", "judge")
        return {"solver": low(own.text)}

    with RemoteServer(gives(chat("right"))) as server:
        remote = {"teacher": {"base_url": server.base_url, "model": "m"}}
        agents = {"solver": {}, "judge": {"remote": "teacher"}}
        trained = run(tmp_path / "run", agents, judged, remote_models=remote)

    stored = trained.trajectories(split="train")
    assert {one.status for one in stored} == {"completed"}, stored[0].error
    assert {one.agent for one in stored} == {"solver"}
    assert {turn.agent for one in stored for turn in one.remote_turns} == {"judge"}
    assert not trained.audit().violations


@pytest.mark.parametrize(
    ("agents", "more", "said"),
    [
        ({"solver": {}, "judge": {"remote": "teacher"}}, {}, "'teacher' is not in remote_models"),
        (
            {"solver": {}, "critic": {}},
            {"remote_models": {"critic": {"model": "m"}}},
            "'critic' is also the name of a remote model",
        ),
        ({"solver": {"train": False}}, {}, "is trained: set train: true for at least one"),
        ({"solver": {}, "rival": {"lag": 2}}, {}, "agents.rival: version and lag"),
        (
            {"solver": {}, "rival": {"weights_of": "solvr"}},
            {},
            "'solvr' does not have its own weights",
        ),
        ({"solver": {"model": TINY}}, {}, "agents.solver.model: the first trained agent"),
        ({"sol ver": {}}, {}, "'sol ver' is not a valid name"),
        ({"solver": {"trian": True}}, {}, "agents.solver.trian: unknown key"),
        (
            {"solver": {}},
            {"rollout": {"samplers": 1}},
            "rollout.samplers: not supported in a run with",
        ),
        (
            {"solver": {}},
            {"algorithm": "remax"},
            "algorithm.name=remax: not supported in a run with",
        ),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_made(tmp_path, agents, more, said):
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", agents, **more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("process", [learn, sample, serve, run_gateway])
def test_processes_apart_refuse_several_policies(process, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"query": "1"}\n{"query": "2"}\n')
    config = build_config(
        SECTIONS
        | {
            "agent": {"type": "duo_of_test"},
            "agents": {"solver": {}, "critic": {}},
            "tasks": {"train": [str(tmp_path / "tasks.jsonl")]},
            "run": {"dir": str(tmp_path / "run")},
        },
        needs_environment=False,
    )
    with pytest.raises(ConfigError, match="agents: the engines of a run in several processes"):
        process(config)

    assert not (tmp_path / "run").exists()


LEARNING = {
    "trainer": {"steps": 30, "groups_per_step": 2, "group_size": 8, "learning_rate": 0.01},
    "evaluation": {"tasks": 1, "samples": 0},
    "checkpoint": {"every": 0},
}


async def each_for_itself(task, agents):
    """The solver is to write characters before "m", the writer others."""
    asked = [{"role": "user", "content": task.query}]
    first = await agents["solver"].generate(asked)
    second = await agents["writer"].generate([*asked, first.message, *asked])
    return {"solver": low(first.text), "writer": 1 - low(second.text)}


def earned(run, agent):
    """The mean reward of the first and of the last five steps."""
    scores = [
        row[f"agents/{agent}/critic/score/mean"]
        for row in read_metrics(run.dir / "metrics.jsonl")
        if f"agents/{agent}/critic/score/mean" in row
    ]
    return sum(scores[:5]) / 5, sum(scores[-5:]) / 5


@pytest.mark.soak
def test_the_chosen_agents_reward_rises_and_the_others_weights_stay(tmp_path, policies):
    agents = {"writer": {"train": False}, "solver": {}}
    trained = run(tmp_path / "run", agents, each_for_itself, **LEARNING)
    before, after = earned(trained, "solver")
    assert after > before + 0.2
    before, after = earned(trained, "writer")
    assert abs(after - before) < 0.15
    assert policies.moved("solver") and not policies.moved("writer")


@pytest.mark.soak
def test_two_adapters_over_one_base_are_both_trained(tmp_path, policies):
    loaded = load_model(ModelSection.model_validate(TINY), seed=3)
    base = save_model(loaded.model, loaded.tokenizer, tmp_path / "base")
    lora = {"name": str(base), "lora": {"rank": 8}}
    more = LEARNING | {"trainer": LEARNING["trainer"] | {"learning_rate": 0.06, "steps": 40}}

    agents = {"solver": {}, "writer": {}}
    trained = run(tmp_path / "run", agents, each_for_itself, **more, model=lora)
    for name in agents:
        before, after = earned(trained, name)
        assert after > before + 0.2, name
        assert policies.moved(name) and all("lora_" in key for key in policies.moved(name))

    one, other = (dict(policies.models[name].named_parameters()) for name in agents)
    shared = {name for name, tensor in one.items() if tensor is other[name]}
    assert shared == {name for name in one if "lora_" not in name}
    assert any(not torch.equal(one[name], other[name]) for name in one if "lora_B" in name)

    last = trained.checkpoint_path("last")
    saved = load_file(last / "agents" / "writer" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)

    again = run(
        tmp_path / "run",
        agents,
        each_for_itself,
        resume=True,
        model=lora,
        **(more | {"trainer": more["trainer"] | {"steps": 41}}),
    )
    one, other = (dict(policies.models[name].named_parameters()) for name in agents)
    assert {name for name, tensor in one.items() if tensor is other[name]} == shared
    assert not again.audit().violations


@agentevo.agent("duo_of_test")
class Duo:
    """The two of `play`, by a name for recipes."""

    async def run(self, task, policy):
        return await play(task, policy)

    def __init__(self, config):
        pass


@pytest.mark.slow
def test_the_doctor_examines_the_main_agent(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"query": "1"}\n{"query": "2"}\n')
    config = build_config(
        SECTIONS
        | {
            "agent": {"type": "duo_of_test"},
            "agents": {"critic": {"train": False}, "solver": {}},
            "tasks": {"train": [str(tmp_path / "tasks.jsonl")]},
        },
        needs_environment=False,
    )
    results = {one.name: one.status for one in check_recipe(config)}
    assert results["attempts"] == results["token ids"] == results["log-probs"] == "good"
