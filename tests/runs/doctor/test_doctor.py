"""The doctor on real recipes with a tiny policy: it finds what is in order and what is not, and
leaves nothing behind."""

import json
from pathlib import Path

import pytest
from PIL import Image

from agentevo.agents.agent import agents
from agentevo.config import RunConfig, build_config
from agentevo.models.files.save import save_model
from agentevo.runs.doctor import memory_measures
from agentevo.runs.doctor.checks import Check, judge_memory
from agentevo.runs.doctor.diagnostics import check_recipe
from agentevo.runs.doctor.installation import check_installation
from agentevo.types import Message

TREE = {
    "environment": {"type": "frozen_lake"},
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
    "agent": {"format": "plain", "max_turns": 3},
    "sampling": {"max_new_tokens": 4},
    "trainer": {"group_size": 3, "groups_per_step": 2},
}


def recipe(*overrides: str) -> RunConfig:
    return build_config(TREE, overrides)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(Path().iterdir()) == [], "the doctor leaves nothing behind"


@pytest.mark.slow
def test_a_model_from_a_folder_is_judged_as_one_that_is_made(
    tiny_policy, tmp_path_factory, monkeypatch
):
    """With what adapters would save: their base stands on the device meta for that."""
    made = tiny_policy(tokenizer="byte", num_layers=1, context_length=2048)
    folder = save_model(made.model, made.tokenizer, tmp_path_factory.mktemp("model") / "saved")
    measures: dict[str, float] = {}

    def judge(needed: object, free: object, turned: dict[str, float]) -> Check:
        measures.update(turned)
        return judge_memory(needed, free, turned)

    monkeypatch.setattr(memory_measures, "judge_memory", judge)
    tree = {**TREE, "model": {"name": str(folder)}}
    assert by_name(check_recipe(build_config(tree, ())))["memory"].status == "good"
    assert not measures, "none is needed"

    monkeypatch.setattr(memory_measures.devices, "memory", lambda device: (2.0**20, 0.0))
    assert by_name(check_recipe(build_config(tree, ())))["memory"].status == "wrong"
    assert any(change.startswith("model.lora.rank=") for change in measures)


@pytest.mark.slow
def test_a_sound_recipe():
    found = by_name(check_recipe(recipe()))
    assert list(found) == [
        "attempts",
        "token ids",
        "drift",
        "computation",
        "log-probs",
        "rewards",
        "completions",
        "calls",
        "exploration",
        "turns",
        "context",
        "key-value memory",
        "memory",
    ]
    assert [
        name
        for name in (
            "attempts",
            "token ids",
            "drift",
            "log-probs",
            "context",
            "key-value memory",
            "memory",
        )
        if found[name].status != "good"
    ] == []
    assert "all 3 ran to their end" in found["attempts"].finding


@pytest.mark.slow
def test_tasks_with_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    Image.new("RGB", (32, 16), "red").save(folder / "red.png")
    rows = [{"query": query, "image": "red.png", "answer": "red"} for query in ("Color?", "Which?")]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "tasks": {"train": str(folder / "tasks.jsonl")},
        "rewards": ["exact_match"],
        "model": {"name": "tiny", "tiny": {"vision": True, "tokenizer": "byte", "num_layers": 1}},
        "sampling": {"max_new_tokens": 4},
        "trainer": {"group_size": 2},
    }
    checks = by_name(check_recipe(build_config(tree, ())))
    assert checks["attempts"].status == "good"
    assert checks["log-probs"].status == "good"


@pytest.mark.slow
def test_an_agent_that_edits_its_history():
    async def agent(task, policy):
        messages = [Message("user", "Go.")]
        for number in range(3):
            reply = await policy.generate(messages)
            messages += [Message("assistant", f"It said {number}."), Message("user", "And?")]
        return float(reply.turn)

    agents.register("edits_its_history")(agent)
    tree = recipe().model_dump(mode="json", exclude_unset=True)
    tree["agent"] = {"type": "edits_its_history", "max_turns": 3}
    drift = by_name(check_recipe(build_config(tree)))["drift"]
    assert drift.status == "warning" and "merge rate 0%: 0 of 6 requests" in drift.finding
    assert "content_edited 6, first in " in drift.finding
    assert "received 'assistant: It said 0.'" in drift.finding
    assert ", message 2: recorded 'assistant: " in drift.finding


@pytest.mark.slow
def test_turns_that_start_anew_need_little_context():
    def longest(found: dict[str, Check]) -> int:
        return int(found["context"].finding.split("longest conversation ")[1].split()[0])

    anew = by_name(check_recipe(recipe("agent.memory=turn")))
    assert (anew["token ids"].status, anew["log-probs"].status, anew["context"].status) == (
        "good",
        "good",
        "good",
    )
    assert longest(anew) < longest(by_name(check_recipe(recipe())))


@pytest.mark.slow
def test_completions_that_are_always_cut():
    words = ["agent.format=think_answer", "agent.format_penalty=0", "sampling.max_new_tokens=1"]
    cut = by_name(check_recipe(recipe(*words)))["completions"]
    assert cut.status == "warning"
    assert "cut by the token limit" in cut.finding and "sampling.max_new_tokens" in cut.advice


@pytest.mark.slow
def test_a_context_that_is_too_short_breaks_every_attempt():
    found = by_name(check_recipe(recipe("model.tiny.context_length=32")))
    assert found["attempts"].status == "wrong"
    assert "32" in found["attempts"].finding


@pytest.mark.slow
def test_before_a_cold_start_bad_play_is_expected():
    words = ["agent.format=think_answer", "agent.format_penalty=0", "sampling.max_new_tokens=1"]
    before = by_name(check_recipe(recipe("cold_start.episodes=8", *words)))
    without = by_name(check_recipe(recipe(*words)))
    assert [(before[name].status, without[name].status) for name in ("rewards", "completions")] == [
        ("warning", "warning"),
        ("warning", "warning"),
    ]
    assert "cold start" in before["rewards"].advice
    assert "cold start" not in without["completions"].advice


@pytest.mark.slow
def test_a_recipe_that_only_evaluates_needs_no_reward_spread():
    assert "rewards" not in by_name(
        check_recipe(recipe("trainer.steps=0", "trainer.group_size=1", "sampling.top_p=0.9"))
    )


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_verdicts():
    play = ("attempts", "token ids", "rewards", "completions", "calls", "exploration", "turns")
    first = by_name(check_recipe(recipe()))
    second = by_name(check_recipe(recipe()))
    assert [first[name] for name in play] == [second[name] for name in play]


def test_the_installation():
    found = by_name(check_installation())
    assert {
        "python",
        "torch",
        "processor",
        "threads",
        "memory",
        "disk",
        "gpu",
        "model smollm2-135m-instruct",
    } <= set(found)
    assert found["torch"].status == "good"
    assert all(check.finding for check in found.values())
