"""The policy and the recipe that the examples here begin with.

The policy is a tiny Llama with random weights, in which what is said of a word begins as what is
read of it (examples/frameworks/cold_start.py). Its tokenizer has the words of other tasks for the
same server, so it is made before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from agentevo.cli.main import main as agentevo
from agentevo.config import TinyModel
from agentevo.config.tool_entries import ToolEntry
from agentevo.models.tiny import make_tiny
from agentevo_evolve.task_making.demonstrations import demonstration
from agentevo_evolve.task_making.server_tasks import WantedTasks, make_tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))
from cold_start import CHAT_TEMPLATE, CONTEXT, _prepare_to_repeat, _texts

_entry: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ToolEntry)
WITHOUT = ("curriculum", "demonstrations", "new_tasks")


def arguments(description: str, out: str) -> argparse.ArgumentParser:
    """What every example here may be given."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of policy and draws")
    parser.add_argument("--without", nargs="*", choices=WITHOUT, default=[], help="ablations")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning from reward")
    parser.add_argument("--hidden", type=int, default=128)

    return parser


def rows_of(tool: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Conversations about other tasks for the same server."""
    given = {
        key: tuple(one) if isinstance(one, list) else one
        for key, one in tasks.items()
        if key not in ("train", "held_out")
    }
    wanted = WantedTasks(**{**given, "train": 150, "held_out": 0, "seed": 999})
    made = asyncio.run(make_tasks([_entry.validate_python(tool)], wanted))
    return [demonstration(row, made.survey.specs) for row in made.train]


def base(folder: Path, rows: Sequence[dict[str, Any]], hidden: int) -> str:
    """A policy that has learnt nothing, with a tokenizer that has the words of `rows`."""
    words = _texts(rows) | {json.dumps(row, ensure_ascii=False) for row in rows}
    shape = TinyModel(hidden_size=hidden, num_layers=2, num_heads=4, context_length=CONTEXT)
    model, tokenizer = make_tiny(shape, words, seed=0)
    tokenizer.chat_template = CHAT_TEMPLATE
    _prepare_to_repeat(model, tokenizer.get_vocab())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def recipe(
    given: argparse.Namespace,
    tools: Sequence[Mapping[str, Any]],
    tasks: Mapping[str, Any],
    model: str,
    **more: Any,
) -> dict[str, Any]:
    """What `agentevo evolve` reads. `more`: further keys of its section `evolve`."""
    fine_tuning = {
        "sft": {
            "epochs": given.epochs,
            "batch_conversations": 8,
            "learning_rate": 3e-3,
            "min_lr_ratio": 0.1,
        },
        "data": {"eval_share": 0},
    }
    source = "none" if "demonstrations" in given.without else "calls"
    return {
        "evolve": {
            "tasks": {"train": given.tasks, "held_out": given.held_out, **tasks},
            "demonstrations": {
                "source": source,
                "count": given.demonstrations,
                "config": fine_tuning,
            },
            "rounds": given.rounds,
            "new_tasks": 0 if "new_tasks" in given.without else given.tasks // 4,
            "seeds": given.seeds,
            **more,
        },
        "run": {"dir": str((given.out / "evolved").absolute())},
        "model": {"name": model},
        "agent": {"tools": [dict(tool) for tool in tools], "max_turns": 6},
        "tasks": {"curriculum": None} if "curriculum" in given.without else {},
        "sampling": {"max_new_tokens": 128},
        "algorithm": {"name": "grpo"},
        "trainer": {
            "steps": given.steps,
            "groups_per_step": 8,
            "group_size": 8,
            "learning_rate": given.rate,
        },
        "evaluation": {"tasks": given.held_out, "samples": 0, "every": 0},
        "tracking": {"report": False, "tensorboard": False},
    }


def evolve(
    given: argparse.Namespace,
    tools: Sequence[Mapping[str, Any]],
    tasks: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    **source: Any,
) -> int:
    """Makes the policy, which has the words of `rows`, and runs the command."""
    given.out.mkdir(parents=True, exist_ok=True)
    model = base((given.out / "base").absolute(), rows, given.hidden)
    file = given.out / "evolve.yaml"
    tree = recipe(given, tools, tasks, model, **source)
    file.write_text(yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False))
    return agentevo(["evolve", str(file)])
