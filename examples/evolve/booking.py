"""A tiny policy and a booking office that it knows nothing of: `agentevo evolve` makes the tasks,
shows some, and lets it learn from the state that its calls leave.

    python booking.py --out runs/evolve_booking

The policy is a tiny Llama with random weights, in which what is said of a word begins as what is
read of it (examples/frameworks/cold_start.py). Its tokenizer has the words of other tasks of the
same kind, so it is made before, from a making of its own with another seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import yaml

from agentevo.cli.main import main as agentevo
from agentevo.config import TinyModel
from agentevo.config.tools import FunctionToolSection
from agentevo.models.tiny import make_tiny
from agentevo.task_making.demonstrations import demonstration
from agentevo.task_making.making import Made, Wanted, make_tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))
from cold_start import CHAT_TEMPLATE, CONTEXT, _prepare_to_repeat, _texts

OFFICE = {"name": "booking", "options": {"rooms": 9}}
KINDS, WORLDS, CALLS = ["state"], 1000, 2


def words() -> Made:
    """Tasks whose words the tokenizer knows."""
    wanted = Wanted(
        train=150, held_out=0, seed=999, worlds=WORLDS, max_calls=CALLS, kinds=tuple(KINDS)
    )
    return asyncio.run(make_tasks([FunctionToolSection(**OFFICE)], wanted))


def base(folder: Path, hidden: int) -> str:
    """A policy that has learnt nothing."""
    made = words()
    rows = [demonstration(row, made.known.specs) for row in made.train]
    shape = TinyModel(hidden_size=hidden, num_layers=2, num_heads=4, context_length=CONTEXT)
    model, tokenizer = make_tiny(shape, _texts(rows), seed=0)
    tokenizer.chat_template = CHAT_TEMPLATE
    _prepare_to_repeat(model, tokenizer.get_vocab())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def recipe(given: argparse.Namespace, model: str) -> dict[str, object]:
    """What `agentevo evolve` reads."""
    return {
        "evolve": {
            "tasks": {
                "train": given.tasks,
                "held_out": given.held_out,
                "worlds": WORLDS,
                "max_calls": CALLS,
                "kinds": KINDS,
                "max_difficulty": 3,
            },
            "demonstrations": {
                "count": given.demonstrations,
                "config": {
                    "sft": {
                        "epochs": 1,
                        "batch_conversations": 8,
                        "learning_rate": 3e-3,
                        "min_lr_ratio": 0.1,
                    },
                    "data": {"eval_share": 0},
                },
            },
            "rounds": given.rounds,
            "new_tasks": given.tasks // 4,
        },
        "run": {"dir": str(given.out / "evolved")},
        "model": {"name": model},
        "agent": {"tools": [OFFICE], "max_turns": 6},
        "sampling": {"max_new_tokens": 64},
        "algorithm": {"name": "grpo"},
        "trainer": {
            "steps": given.steps,
            "groups_per_step": 8,
            "group_size": 8,
            "learning_rate": 1e-3,
        },
        "evaluation": {"tasks": given.held_out, "samples": 0, "every": 0},
        "tracking": {"report": False, "tensorboard": False},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/evolve_booking"))
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--demonstrations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    tree = recipe(given, base(given.out / "base", given.hidden))
    file = given.out / "booking.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False))
    return agentevo(["evolve", str(file)])


if __name__ == "__main__":
    sys.exit(main())
