"""A program on another machine, so to say: its own loop, without torch, in a folder of its own.

    python loop_client.py URL KEY UNTIL_STEP [native|client|agents]

It prints a line of JSON for every step: [step, mean reward, reasons of drops].
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

if __name__ == "__main__":
    sys.modules |= dict.fromkeys(("torch", "accelerate"))  # type: ignore[arg-type]

import httpx

import agentevo

TASKS = [{"id": str(n), "query": f"Say a{n}."} for n in range(3)]
SECTIONS = {
    "model": {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}},
    "sampling": {"max_new_tokens": 4},
    "trainer": {"group_size": 8, "learning_rate": 1e-2, "warmup_steps": 0},
    "checkpoint": {"every": 2},
    "tracking": {"report": False, "tensorboard": False},
}


def reward_of(text: str) -> float:
    return sum(character in "abcdefghijklm" for character in text) / 4


@agentevo.rollout
async def native(task, policy):
    reply = await policy.generate([{"role": "user", "content": task.query}])
    return reward_of(reply.text)


@agentevo.rollout
def by_client(task):
    response = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": task.query}]},
        timeout=300,
    )
    return reward_of(response.raise_for_status().json()["choices"][0]["message"]["content"])


@agentevo.rollout
async def duo(task, policy):
    asked = [{"role": "user", "content": task.query}]
    first = await policy["solver"].generate(asked)
    second = await policy["critic"].generate([*asked, first.message, *asked])
    return {"solver": reward_of(first.text), "critic": 1 - reward_of(second.text)}


async def main(url: str, key: str, until: int, kind: str) -> None:
    answer = {"client": by_client, "agents": duo}.get(kind, native)
    agents = {"agents": {"solver": {}, "critic": {}}} if kind == "agents" else {}
    async with (
        agentevo.Client(url, key, patience_s=300) as client,
        client.open_model("mine", **SECTIONS | agents) as model,
    ):
        print(json.dumps([model.step, 0.0, []]), flush=True)
        while model.step < until:
            groups = await agentevo.gather(answer.group(model, task) for task in TASKS)
            trained = await model.train(groups)
            again = await model.train(groups)
            assert again == trained
            reasons = sorted(set(trained.dropped.values()))
            print(json.dumps([trained.step, trained.reward, reasons]), flush=True)

        await model.fetch("fetched")
        print(json.dumps([(one.name, one.is_open) for one in await client.models()]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
