"""Trains one of the worlds: the cold start of the frameworks' examples, then GRPO with the world's
own tasks and reward, then success on its held-out tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentevo
from cold_start import make_policy, open_box


def learn_world(
    trained: Any,
    teacher: Any,
    *,
    opens: Callable[[str], str] = open_box,
    steps: int = 9,
    **options: Any,
) -> None:
    """Trains, prints success before and after, and leaves both in result.json. `trained`: what
    `agentevo.train` takes, with the sections `options`; `teacher`: an agent that plays hunts in the
    same world; `opens`: how a box is opened there."""
    parser = argparse.ArgumentParser()
    name = Path(sys.argv[0]).stem
    parser.add_argument("--out", type=Path, default=Path("runs/worlds") / name)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--held-out", type=int, default=64, help="tasks of an evaluation")
    parser.add_argument("--conversations", type=int, default=1536, help="of the cold start")
    given = parser.parse_args()
    policy = make_policy(given.out, teacher, conversations=given.conversations, opens=opens)
    run = agentevo.train(
        trained,
        model=str(policy),
        algorithm="grpo",
        sampling={"max_new_tokens": 48},
        trainer={
            "steps": given.steps,
            "groups_per_step": 8,
            "group_size": 8,
            "learning_rate": 1e-3,
        },
        evaluation={"tasks": given.held_out, "samples": 0, "every": 0},
        checkpoint={"every": 0},
        run={"dir": str(given.out / "run"), "overwrite": True},
        tracking={"report": False, "tensorboard": False},
        **options,
    )
    result = {name: run.summary["eval"][name] for name in ("before", "after")}
    (given.out / "result.json").write_text(json.dumps(result))
    print(f"{name}: {result['before']:.0%} -> {result['after']:.0%} of the held-out hunts")
