"""The stages that every way to answer goes through: a tiny policy with random weights, supervised
training on demonstrations, then GRPO on questions; and how each stage answers held-out questions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import agentevo
from agentevo.config import TinyModel
from agentevo.models.tiny import make_tiny

CONTEXT = 2048
RULE = ({"name": "exact_match", "place": "answer"},)
QUIET = {"report": False, "tensorboard": False}
Row = Mapping[str, Any]
Shares = dict[str, float]
"""Kind of question -> share of the held-out ones that is answered rightly."""


@dataclass(frozen=True)
class Size:
    """How much of everything. The defaults are those of the tables in README.md."""

    hidden_size: int = 64
    num_layers: int = 2
    reading: int = 9600
    """Short texts from which a policy learns to read before anything else."""
    demonstrations: int = 640
    epochs: int = 4
    sft_learning_rate: float = 3e-3
    steps: int = 20
    """Of GRPO, with `groups` questions each and 8 attempts at each question."""
    groups: int = 8
    learning_rate: float = 1e-3
    questions: int = 1500
    """That GRPO may ask."""
    held_out: int = 200


def write_rows(path: Path, rows: Iterable[Row]) -> str:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_policy(folder: Path, size: Size, texts: Iterable[str], seed: int) -> Path:
    """A model folder of a policy that knows the words of the texts, and nothing else. What it says
    of a word begins as what it reads of it, for all that follows is about repeating words."""
    shape = TinyModel(
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=4,
        context_length=CONTEXT,
    )
    model, tokenizer = make_tiny(shape, texts, seed)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def imitate(
    policy: Path,
    rows: Sequence[Row],
    folder: Path,
    seed: int,
    *,
    batch: int,
    epochs: int = 1,
    learning_rate: float,
) -> Path:
    """Supervised training on demonstrations, so many in an optimizer step; the run's folder."""
    run = agentevo.sft(
        {
            "model": {"name": str(policy)},
            "data": {
                "train": write_rows(folder.parent / f"{folder.name}.jsonl", rows),
                "eval_share": 0,
            },
            "sft": {
                "epochs": epochs,
                "batch_conversations": batch,
                "learning_rate": learning_rate,
                "min_lr_ratio": 0.1,
            },
            "run": {"dir": str(folder), "overwrite": True, "seed": seed},
            "tracking": QUIET,
        }
    )
    return run.dir


def taught(policy: Path, rows: Sequence[Row], folder: Path, size: Size, seed: int) -> Path:
    """The policy after the demonstrations."""
    return imitate(
        policy,
        rows,
        folder,
        seed,
        batch=8,
        epochs=size.epochs,
        learning_rate=size.sft_learning_rate,
    )


def reinforce(
    agent: Mapping[str, Any],
    policy: Path,
    tasks: Mapping[str, str],
    folder: Path,
    size: Size,
    seed: int,
    rewards: Sequence[Mapping[str, Any]] = RULE,
    sections: Mapping[str, Any] = MappingProxyType({}),
    *,
    max_new_tokens: int = 64,
    **algorithm: Any,
) -> tuple[Shares, Shares]:
    """RL, by GRPO unless `algorithm`, keys of that section, says otherwise, on the questions of a
    file. How the policy answers the held-out ones, greedily, before and after: the first reward
    says what is right. `sections`: others of the recipe."""
    options = dict(agent)
    run = agentevo.train(
        options.pop("type"),
        {"train": tasks["train"], "eval": tasks["eval"]},
        agent=options,
        rewards=list(rewards),
        model=str(policy),
        sampling={"max_new_tokens": max_new_tokens},
        algorithm={"name": "grpo", **algorithm},
        trainer={
            "steps": size.steps,
            "groups_per_step": size.groups,
            "group_size": 8,
            "learning_rate": size.learning_rate,
        },
        evaluation={"tasks": size.held_out, "samples": 0, "every": 0},
        checkpoint={"every": 0},
        run={"dir": str(folder), "overwrite": True, "seed": seed},
        tracking=QUIET,
        **sections,
    )
    before, after = (_shares(run.trajectories(split="eval", step=step)) for step in (0, size.steps))
    return before, after


def _shares(attempts: Iterable[Any]) -> Shares:
    """By the kind of question, with which its id begins, and of all. An attempt that broke says
    nothing of the policy."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for one in attempts:
        if one.status != "completed":
            continue
        for kind in (one.task_id.split(":")[0], "all"):
            asked[kind] += 1
            right[kind] += one.success

    return {kind: right[kind] / asked[kind] for kind in asked}
