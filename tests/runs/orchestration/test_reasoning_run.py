"""Whole runs on models whose chat templates open a thought in the generation prompt, or strip old
ones: reinforcement learning with a tool, and supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_templates import QWEN3, QWEN3_THINKING, QWQ, R1, tokenizer_with
from slow import soak
from transformers import LlamaConfig, LlamaForCausalLM

from agentevo.api.run import sft, train
from agentevo.config import build_config
from agentevo.observability import read_metrics
from agentevo.types import Message, Task

TEMPLATES = {"qwen3": QWEN3, "qwen3-thinking": QWEN3_THINKING, "qwq": QWQ, "r1": R1}
OPENING = ("qwen3-thinking", "qwq", "r1")


@pytest.fixture(scope="module", params=["r1", *soak("qwen3", "qwen3-thinking", "qwq")])
def model(request, tmp_path_factory) -> tuple[str, Path]:
    """A tiny model in a folder, with that template."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizer_with(TEMPLATES[request.param])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)

    return request.param, folder


def config_of(folder: Path, model: Path, **sections):
    tree = {
        "model": {"name": str(model)},
        "sampling": {"max_new_tokens": 6},
        "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 3, "learning_rate": 1e-3},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "checkpoint": {"every": 0},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"threads": 1},
    }
    return build_config(tree | sections, [f"run.dir={folder}"], needs_environment=False)


@pytest.mark.slow
def test_a_tool_agent_is_trained_on_policy(model, tmp_path, quiet_view):
    name, folder = model
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def agent(task: Task, policy) -> float:
        """Whatever the policy says, a tool answers, and then the user."""
        messages = [Message("user", task.query)]
        for new in (Message("tool", "2", name="add"), Message("user", "sure?"), None):
            reply = await policy.generate(messages, tools=None if name == "r1" else tools)
            messages += [reply.message, *([new] if new else [])]
        return sum(map(ord, reply.text)) % 5 / 5

    tasks = [Task(id=f"t{n}", query=f"1+{n}?") for n in range(5)]
    config = config_of(tmp_path / "run", folder)
    done = train(config, agent=agent, tasks=tasks, view=quiet_view())
    rows = read_metrics(done.dir / "metrics.jsonl")
    differences = [row["actor/logprob_diff_max"] for row in rows if "actor/logprob_diff_max" in row]
    assert len(differences) == 2 and max(differences) < 1e-4, "trained on what was sampled"

    tokenizer = tokenizer_with(TEMPLATES[name])
    trajectories = done.trajectories()
    assert {trajectory.status for trajectory in trajectories} == {"completed"}

    for trajectory in trajectories:
        assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
        prompts = [tokenizer.decode(turn.prompt_ids) for turn in trajectory.turns]
        after_result = name in OPENING and name != "r1"
        assert [prompt.endswith("<think>\n") for prompt in prompts] == [
            name in OPENING, after_result, name in OPENING,
        ]  # fmt: skip
        assert "2" in prompts[1] and "sure?" in prompts[2]


@pytest.mark.slow
def test_rows_with_and_without_thoughts_are_learned(model, tmp_path, quiet_view):
    _, folder = model
    asked = {"role": "user", "content": "one"}
    rows = [
        [asked, {"role": "assistant", "content": "ONE"}],
        [asked, {"role": "assistant", "content": "<think>\nso\n</think>\n\nONE"}],
        2 * [asked, {"role": "assistant", "content": "ONE"}],
    ]  # fmt: skip

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows * 8))
    config = config_of(
        tmp_path / "sft",
        folder,
        data={"train": [str(path)], "eval_share": 0.0},
        sft={"batch_conversations": 4, "learning_rate": 3e-2, "epochs": 4},
    )
    done = sft(config, view=quiet_view())
    rows_read = read_metrics(done.dir / "metrics.jsonl")
    losses = [row["sft/loss"] for row in rows_read if "sft/loss" in row]
    assert losses[-1] < 0.7 * losses[0]

    (account,) = done.summary["data"].values()
    assert (account["used"], account["left_out"]) == (24, {})
