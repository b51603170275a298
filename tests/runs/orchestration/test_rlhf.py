"""SFT, a reward model, PPO: the three steps of RLHF, each from what the one before has saved."""

from __future__ import annotations

import json

import pytest

import agentevo
from agentevo.config import build_config
from agentevo.runs.orchestration.reward_model import train as train_reward_model

THINGS = ("lamp", "coin", "tree", "door", "boat", "ring")
QUIET = {"report": False, "tensorboard": False}
SHAPE = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "context_length": 128}


def rows(folder, name, made):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(folder / name)


def asked(thing):
    return [{"role": "user", "content": f"a {thing} please"}]


@pytest.mark.soak
def test_a_policy_learns_what_comparisons_say_is_better(tmp_path):
    """It was shown polite and rude answers, as many of each; comparisons prefer the polite ones."""
    polite = {thing: f"here is the {thing}" for thing in THINGS}
    rude = {thing: f"no {thing} today" for thing in THINGS}
    shown = [
        {"messages": [*asked(thing), {"role": "assistant", "content": answers[thing]}]}
        for thing in THINGS
        for answers in (polite, rude)
    ]
    compared = [
        {"prompt": asked(thing), "chosen": polite[thing], "rejected": rude[other]}
        for thing in THINGS
        for other in THINGS
    ]

    questions = [
        {"id": f"{thing} {n}", "query": f"a {thing} please", "answer": "here is"}
        for n in range(3)
        for thing in THINGS
    ]
    sft = agentevo.sft(
        {
            "model": {"name": "tiny", "tiny": SHAPE | {"tokenizer": "byte"}},
            "data": {"train": rows(tmp_path, "shown.jsonl", shown), "eval_share": 0},
            "sft": {"epochs": 60, "batch_conversations": 12, "learning_rate": 1e-2},
            "run": {"dir": str(tmp_path / "sft")},
            "tracking": QUIET,
        }
    )
    judged = train_reward_model(
        build_config(
            {
                "model": {"name": str(sft.dir)},
                "rm": {
                    "pairs": rows(tmp_path, "compared.jsonl", compared),
                    "learning_rate": 3e-3,
                    "epochs": 4,
                    "batch_pairs": 8,
                    "margin": 0.5,
                },
                "run": {"dir": str(tmp_path / "rm")},
            },
            needs_environment=False,
        )
    )
    assert judged["rm/eval/accuracy"] == 1

    run = agentevo.train(
        "single_turn",
        {"train": rows(tmp_path, "questions.jsonl", questions)},
        rewards=[
            {"name": "contains", "place": "whole", "weight": 0},
            {"name": "reward_model", "model": str(tmp_path / "rm" / "model")},
        ],
        model=str(sft.dir),
        sampling={"max_new_tokens": 24},
        algorithm={"name": "ppo", "kl_coef": 0.05},
        critic={"learning_rate": 1e-2},
        trainer={"steps": 8, "groups_per_step": 4, "group_size": 8, "learning_rate": 1e-3},
        evaluation={"tasks": 3, "samples": 8, "every": 0},
        checkpoint={"every": 0},
        run={"dir": str(tmp_path / "ppo")},
        tracking=QUIET,
    )
    shares = []
    rewards = []
    for step in (0, 8):
        attempts = run.trajectories(split="eval", step=step)
        assert all(attempt.status == "completed" for attempt in attempts)
        shares.append(sum(attempt.success for attempt in attempts) / len(attempts))
        rewards.append(sum(attempt.reward for attempt in attempts) / len(attempts))

    assert shares[0] < 0.8 and shares[1] > 0.9, shares
    assert rewards[1] > rewards[0] + 0.2, rewards
