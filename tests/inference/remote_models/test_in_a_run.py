"""Remote models in a whole run: agents ask them in three ways, what they say is stored and not
trained, and nothing that is written has the key."""

from __future__ import annotations

import json

import openai
import pytest
from remote_server import RemoteServer, chat, fails, gives
from slow import soak

import agentevo
from agentevo.api.run import Run
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.models.chat.answer_form import AnswerForm

KEY = "sk-very-secret-0123456789"
TASKS = [{"id": str(n), "query": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(4)]
SECTIONS = {
    "model": {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}},
    "sampling": {"max_new_tokens": 3},
    "trainer": {"steps": 1, "groups_per_step": 2, "group_size": 2},
    "evaluation": {"tasks": 1, "samples": 0},
    "tracking": {"report": False, "tensorboard": False},
}


async def native(task, policy):
    messages = [{"role": "user", "content": task.query}]
    own = await policy.generate(messages)
    taught = await policy.model("teacher").generate(messages, sampling={"temperature": 0.5})
    return float(len(own.text) % 2) + (0.25 if taught.text == "right" else 0.0)


def blocking(task, policy):
    own = policy.generate([{"role": "user", "content": task.query}])
    taught = policy.model("teacher").generate([{"role": "user", "content": task.query}])
    return float(len(own.text) % 2) + (0.25 if taught.text == "right" else 0.0)


async def asks_otherwise(task, policy):
    await policy.generate([{"role": "user", "content": task.query}])
    await policy.model("teacher").generate([{"role": "user", "content": "Something else."}])
    return 1.0


async def does_not_ask(task, policy):
    await policy.generate([{"role": "user", "content": task.query}])
    return 1.0


def client(task):
    messages = [{"role": "user", "content": task.query}]
    own, taught = (
        openai.OpenAI().chat.completions.create(model=name, messages=messages).choices[0].message
        for name in ("policy", "teacher")
    )
    return float(len(own.content) % 2) + (0.25 if taught.content == "right" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("agent", [native, client, *soak(blocking)])
def test_agents_ask_a_remote_model_beside_the_policy(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("REMOTE_KEY", KEY)
    with RemoteServer(gives(chat("right", usage=(10, 4)))) as server:
        teacher = {"base_url": server.base_url, "model": "m", "api_key": "${env:REMOTE_KEY}"}
        run = agentevo.train(
            agent,
            TASKS,
            run={"dir": tmp_path / "run"},
            remote_models={
                "teacher": {**teacher, "price": {"completion": 1e6}, "budget": {"requests": 100}}
            },
            **SECTIONS | {"tracking": {"report": True, "tensorboard": False}},
        )

    attempts = run.trajectories(split="train")
    assert len(attempts) == 4
    for attempt in attempts:
        assert attempt.status == "completed", attempt.error
        assert len(attempt.turns) == 1
        assert [turn.messages[-1].text for turn in attempt.remote_turns] == ["right"]
        assert attempt.metrics["remote_cost"] == pytest.approx(4.0)

    num_asked = len(server.received)
    again = run.replay(attempts[0].id)
    assert again.same, again.line()

    if agent is client:
        assert "uses the gateway" in again.line()
    else:
        assert (again.played, again.remote_turns) == (True, 1)
        assert again.replayed_reward == attempts[0].reward

    assert len(server.received) == num_asked, "a remote model is not asked again"

    other = Run(run.config, agent=asks_otherwise, tasks=run._tasks).replay(attempts[0].id)
    assert "asks the remote model teacher with other messages" in other.line()

    other = Run(run.config, agent=does_not_ask, tasks=run._tasks).replay(attempts[0].id)
    assert "the agent asked remote models 0 times, the record has 1" in other.line()

    told = run.summary["remote_models"]
    (row,) = told["asked"]
    assert (row["model"], row["role"], row["answers"]) == ("teacher", "agent", num_asked)
    assert told["budget_left"] == {"teacher": {"requests": 100 - num_asked}}

    page = (tmp_path / "run/report.html").read_text()
    assert f"Left of the budgets: teacher: {100 - num_asked} requests." in page
    assert 'aria-label="Remote turn 0"><header><b>teacher</b>' in page
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}

    lines = (tmp_path / "run/remote_models/teacher.jsonl").read_text().splitlines()
    assert [json.loads(line)["state"] for line in lines].count("completed") == num_asked
    assert {json.loads(line).get("attempt") for line in lines} >= {one.id for one in attempts}

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_remote_model_that_fails_costs_its_attempts_and_says_why(tmp_path):
    with RemoteServer(fails(400, "the model is gone")) as server:
        teacher = {"base_url": server.base_url, "model": "m"}
        options = {"run": {"dir": tmp_path / "run"}, "remote_models": {"teacher": teacher}}
        with pytest.raises(AgentEvoError, match="the model is gone"):
            agentevo.train(native, TASKS, **options, **SECTIONS)


def test_a_missing_key_is_refused_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.delenv("REMOTE_KEY", raising=False)
    teacher = {"model": "m", "api_key": "${env:REMOTE_KEY}"}
    with pytest.raises(ConfigError, match="REMOTE_KEY is not set"):
        agentevo.train(
            native,
            TASKS,
            run={"dir": tmp_path / "run"},
            remote_models={"teacher": teacher},
            **SECTIONS,
        )

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"model": "m", "api_key": KEY}, "a key would be written"),
        ({"model": "m", "modle": 1}, "did you mean remote_models.teacher.model"),
        ({"model": "m", "budget": {"cost": 1.0}}, "budget.cost needs the price of a token"),
        ({"model": "m", "base_url": "teacher:8000"}, "is not a URL"),
        ({"model": "m", "base_url": "http://me:${env:PW}@host/v1"}, "give the key as api_key"),
        ({"model": "m", "extra": {"max_tokens": 9}}, "max_tokens: each call sets this itself"),
        ({"model": "m", "extra": {"n": 4, "stream": True}}, "n, stream: each call sets"),
        ({}, "remote_models.teacher.model: missing"),
    ],
)
def test_bad_sections_are_refused_by_their_names(section, words):
    with pytest.raises(ConfigError, match=words) as raised:
        agentevo.config.build_config(
            {"environment": {"type": "coins"}, "remote_models": {"teacher": section}}
        )
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("name", ["policy", "two words", "tiny"])
def test_names_that_are_taken_or_none_are_refused(name):
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}
    with pytest.raises(ConfigError, match="remote_models: "):
        agentevo.config.build_config({**tree, "remote_models": {name: {"model": "m"}}})


VERDICT = AnswerForm(
    schema={"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}
)


async def judged(task, policy):
    answer = await policy.generate([{"role": "user", "content": task.query}])
    question = f"{task.query} Somebody says: {answer.text!r}. How good is that, from 0 to 1?"
    verdict = await policy.model("judge").generate(
        [{"role": "user", "content": question}], form=VERDICT
    )
    return float(json.loads(verdict.text)["score"])


@pytest.mark.slow
def test_a_judge_says_the_reward_and_what_it_does_not_judge_has_none(tmp_path):
    """It fails for one attempt, answers nonsense to another, and has money for so many."""
    verdicts = [gives(chat('{"score": 0.5}')), gives(chat('{"score": 1.0}'))]
    with RemoteServer(
        *verdicts, fails(400, "the judge is ill"), gives(chat("good")), *verdicts
    ) as (server):
        judge = {"base_url": server.base_url, "model": "m", "budget": {"requests": 6}}
        run = agentevo.train(
            judged,
            TASKS,
            run={"dir": tmp_path / "run"},
            remote_models={"judge": judge},
            **SECTIONS | {"trainer": {"steps": 1, "groups_per_step": 2, "group_size": 4}},
        )

    assert server.received[0]["response_format"]["json_schema"]["schema"] == VERDICT.schema
    assert len(server.received) == 6

    attempts = run.trajectories()
    assert sorted(attempt.reward for attempt in attempts if attempt.status == "completed") == [
        0.5,
        0.5,
        1,
        1,
    ]

    reasons = [attempt.error for attempt in attempts if attempt.status == "failed"]
    assert any("the judge is ill" in reason for reason in reasons)
    assert any("JSONDecodeError" in reason for reason in reasons)
    assert any("budget.requests=6" in reason for reason in reasons)
    assert len(reasons) == len(attempts) - 4

    (row,) = run.summary["remote_models"]["asked"]
    assert (row["answers"], row["failed_requests"]) == (5, 1)
    assert run.summary["remote_models"]["budget_left"] == {"judge": {"requests": 0}}
