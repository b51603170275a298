"""A model that writes Harmony is taught, served and trained: thoughts, calls and answers come
apart, and each turn continues the drawn ids."""

from __future__ import annotations

import json

import openai
import pytest
from harmony_model import ARGUMENTS, ASK, SAW, SAYS, THOUGHT, TOOL, taught

import agentevo
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.observability import read_metrics
from agentevo.runs.folder.run_folder import saved_tokenizer
from agentevo.types import context_of

pytestmark = pytest.mark.slow


async def asks(task, policy):
    """Three turns through OpenAI's API: a call, its result and an answer, another question."""
    messages = [ASK]
    seen = []
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            said = answer.choices[0].message
            seen.append(
                (
                    said.content or "",
                    getattr(said, "reasoning_content", None),
                    [(c.function.name, c.function.arguments) for c in said.tool_calls or ()],
                )
            )
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": SAW}
                for call in said.tool_calls or ()
            ] or [ASK]

    policy.keep_files({"seen.json": json.dumps(seen).encode()})
    return sum(map(ord, str(seen))) % 97 / 97


def test_a_model_of_harmony_is_taught_and_trained_with_tools(tmp_path):
    learned = taught(tmp_path)
    losses = [
        row["sft/loss"]
        for row in read_metrics(tmp_path / "sft" / "metrics.jsonl")
        if "sft/loss" in row
    ]
    assert losses[-1] < 0.05

    run = agentevo.train(
        asks,
        tasks=[{"id": str(n), "query": ASK["content"]} for n in range(4)],
        model={"name": str(learned.checkpoint)},
        sampling={"max_new_tokens": 120, "temperature": 0.7},
        trainer={"steps": 1, "groups_per_step": 2, "group_size": 2, "learning_rate": 1e-4},
        evaluation={"tasks": 1, "samples": 0, "every": 0},
        tracking={"report": False, "tensorboard": False},
        run={"dir": str(tmp_path / "run"), "threads": 1},
    )
    attempts = run.trajectories()
    seen = [json.loads(attempt.files["seen.json"]) for attempt in attempts]
    expected = [["", THOUGHT, [["look", json.dumps(ARGUMENTS)]]], [SAYS, None, []]]
    assert sum(turns[:2] == expected for turns in seen) > len(seen) / 2

    chat = ChatFormat(saved_tokenizer(tmp_path / "run"))
    for attempt, turns in zip(attempts, seen, strict=True):
        if turns[:2] == expected:
            assert [turn.parent for turn in attempt.turns] == [None, 0, 1]
            text = chat.tokenizer.decode(context_of(attempt.turns, 2))
            assert f"<|channel|>analysis<|message|>{THOUGHT}<|end|>" in text
            assert f"{SAYS}<|return|><|start|>user" in text

    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    distances = [row["actor/ppo_kl"] for row in rows if "actor/ppo_kl" in row]
    assert distances and max(map(abs, distances)) < 1e-5
    assert run.audit().violations == []
