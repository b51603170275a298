"""Trains one example: the cold start, then reinforcement learning, then success on held-out hunts.

python openai_sdk.py --out runs/frameworks/openai    # any of the examples
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agentevo
from agentevo.agents.agent import FunctionAgent
from cold_start import make_policy
from hunt import make_tasks

STEPS = 4
HELD_OUT = 64


def learn(
    rollout: Callable[..., Any] | None = None,
    *,
    command: Sequence[str] | None = None,
    sections: dict[str, Any] | None = None,
    **cold_start: Any,
) -> dict[str, float]:
    """Trains the agent, prints success before and after, and leaves both in result.json.

    `cold_start`: options of `make_policy`; `sections`: of `agentevo.train`, over those below."""
    name = Path(sys.argv[0]).stem
    given = options(Path("runs/frameworks") / name, steps=STEPS).parse_args()
    if command is not None:
        from agentevo.agents.command import CommandAgent, CommandAgentSection

        player: Any = CommandAgent(CommandAgentSection(type="command", command=list(command)))
    else:
        player = FunctionAgent(rollout)

    policy = make_policy(given.out, player, conversations=given.conversations, **cold_start)
    return reinforced(
        given,
        rollout,
        make_tasks(1200, seed=0),
        command=command,
        model=str(policy),
        **(sections or {}),
    )


def options(out: Path, *, steps: int, conversations: int = 1536) -> argparse.ArgumentParser:
    """What every example can be given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of training; the cold start has 0")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="tasks of an evaluation")

    help_text = "of the cold start"
    parser.add_argument("--conversations", type=int, default=conversations, help=help_text)
    return parser


def reinforced(given: argparse.Namespace, *trained: Any, **sections: Any) -> dict[str, Any]:
    """Trains with GRPO what `agentevo.train` takes, prints success before and after, and leaves
    both in result.json. `sections` are over those below."""
    run = agentevo.train(
        *trained,
        **{
            "sampling": {"max_new_tokens": 48},
            "algorithm": {"name": "grpo"},
            "trainer": {
                "steps": given.steps,
                "groups_per_step": 8,
                "group_size": 8,
                "learning_rate": given.learning_rate,
            },
            "evaluation": {"tasks": given.held_out, "samples": 0, "every": 0},
            "checkpoint": {"every": 0},
            "run": {"dir": str(given.out / "run"), "overwrite": True, "seed": given.seed},
            "tracking": {"report": False, "tensorboard": False},
            **sections,
        },
    )
    result = {name: run.summary["eval"][name] for name in ("before", "after")}
    result |= {"sampled": run.summary["eval"]["sampled"], "steps": given.steps}
    (given.out / "result.json").write_text(json.dumps(result))
    name = given.out.name
    print(f"{name}: {result['before']:.0%} -> {result['after']:.0%} of the held-out tasks")

    return result
