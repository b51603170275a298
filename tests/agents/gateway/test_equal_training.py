"""Training through the gateway equals training through `policy.generate`."""

from __future__ import annotations

import os
import sys

import httpx
import openai
import pytest

import agentevo
from agentevo.observability import read_metrics

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}
TASKS = [{"id": str(n), "query": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(6)]
SECTIONS = {
    "model": TINY,
    "sampling": {"max_new_tokens": 4},
    "trainer": {"steps": 1, "groups_per_step": 2, "group_size": 3},
    "evaluation": {"tasks": 2, "samples": 0},
    "tracking": {"report": False, "tensorboard": False},
}


def reward_of(text: str) -> float:
    return sum(map(ord, text)) % 7 / 7


async def native(task, policy):
    messages = [{"role": "user", "content": task.query}]
    first = await policy.generate(messages)
    messages += [first.message, {"role": "user", "content": "Sure?"}]
    second = await policy.generate(messages, sampling={"max_new_tokens": 3})
    return reward_of(first.text + second.text)


async def through_openai(task, policy):
    messages = [{"role": "user", "content": task.query}]
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        first = await client.chat.completions.create(model="policy", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
        second = await client.chat.completions.create(
            model="any", messages=messages, max_tokens=3, temperature=0.3
        )

    return reward_of(first.choices[0].message.content + second.choices[0].message.content)


def rollout(task):
    """Has no parameter for the policy, and is not async."""
    client = openai.OpenAI()
    messages = [{"role": "user", "content": task.query}]
    first = client.chat.completions.create(model="policy", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(model="any", messages=messages, max_tokens=3)
    return reward_of(first.choices[0].message.content + second.choices[0].message.content)


def through_messages(task):
    """Anthropic's API, by the variables that its client reads."""

    def ask(messages, **options):
        answer = httpx.post(
            os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
            json={"model": "policy", "messages": messages, **options},
            headers={"x-api-key": os.environ["ANTHROPIC_API_KEY"]},
            timeout=300,
        )
        return answer.raise_for_status().json()["content"]

    messages = [{"role": "user", "content": task.query}]
    first = ask(messages, max_tokens=4)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    second = ask(messages, max_tokens=3)
    return reward_of("".join(block["text"] for block in first + second))


PROGRAM = """
import json, os, urllib.request

def ask(messages, **options):
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"content-type": "application/json"}
    headers["authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as answer:
        return json.load(answer)["choices"][0]["message"]

task = json.loads(os.environ["AGENTEVO_TASK"])
messages = [{"role": "user", "content": task["query"]}]
first = ask(messages)
second = ask([*messages, first, {"role": "user", "content": "Sure?"}], max_tokens=3)
print(json.dumps({"reward": sum(map(ord, first["content"] + second["content"])) % 7 / 7}))
"""


@pytest.mark.slow
def test_tokens_and_loss_are_those_of_the_native_handle(tmp_path):
    runs = {
        agent.__name__: agentevo.train(
            agent, TASKS, run={"dir": str(tmp_path / agent.__name__)}, **SECTIONS
        )
        for agent in (native, through_openai, rollout, through_messages)
    }
    (tmp_path / "program.py").write_text(PROGRAM)
    runs["program"] = agentevo.train(
        command=[sys.executable, "-S", "program.py"],
        tasks=TASKS,
        agent={"cwd": str(tmp_path)},
        run={"dir": str(tmp_path / "program")},
        **SECTIONS,
    )
    turns = {
        name: sorted(
            (trajectory.id, trajectory.reward, [list(t.completion_ids) for t in trajectory.turns])
            for trajectory in run.trajectories(split="train")
        )
        for name, run in runs.items()
    }
    assert all(turns[name] == turns["native"] for name in runs)
    assert all(len(ids) == 2 for _, _, ids in turns["native"])

    losses = {
        name: [
            row["actor/pg_loss"]
            for row in read_metrics(run.dir / "metrics.jsonl")
            if "actor/pg_loss" in row
        ]
        for name, run in runs.items()
    }
    assert len(losses["native"]) == 1
    assert all(losses[name] == losses["native"] for name in runs)

    again = agentevo.load_run(tmp_path / "program", tasks=TASKS)
    assert again.eval() == runs["program"].eval()

    replay = again.replay(next(name for name, *_ in turns["program"] if "@1" in name))
    assert replay.same and not replay.played and replay.tokens > 0
