"""Two runs of `rollout.policy: wait`, staleness 2, whose tools take other times, compared token by
token: every id, log-prob, version and prompt, the step that each attempt was trained in, and every
step's plan.

    python tests/faults/wait_twice.py --steps 120    # some five minutes
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentevo.api.run import train
from agentevo.runs.folder.run_folder import read_store

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import asynchronous

GROUPS = 8


def run(folder: Path, latency: str, steps: int) -> tuple[dict[str, Any], list[Any], float]:
    """The trained attempts by id, the plans of the steps, and the success after it."""
    asynchronous.RECIPE["trainer"] |= {"steps": steps, "groups_per_step": GROUPS}
    config = asynchronous.configure(folder, seed=0, staleness=2, policy="wait")

    async def play(task: Any, policy: Any) -> Any:
        agent = asynchronous.EnvironmentAgent(
            config.agent, lambda: asynchronous.make_environment(config)
        )
        seconds = asynchronous.latencies(latency, latency + policy.name)
        slow = "/train@" in policy.name
        return await agent.run(task, asynchronous.SlowTools(policy, seconds) if slow else policy)

    kind = asynchronous.RECIPE["environment"]["type"]
    tasks = [
        *asynchronous.environment_tasks(kind, 0, "train", 0, steps * GROUPS),
        *asynchronous.environment_tasks(kind, 0, "eval", 0, config.evaluation.tasks),
    ]
    view = asynchronous.LiveView("twice", plain=True, stream=io.StringIO())
    done = train(config, agent=play, tasks=tasks, view=view)

    async def read(store: Any) -> tuple[dict[str, Any], list[Any]]:
        attempts = {
            stored.trajectory.id: (
                [
                    (t.prompt_ids, t.completion_ids, t.logprobs, t.versions)
                    for t in stored.trajectory.turns
                ],
                stored.trained_step,
            )
            async for stored in store.trajectories(state="committed")
        }
        return attempts, [record.record["plan"] for record in await store.steps()]

    attempts, plans = read_store(done.dir, read)
    return attempts, plans, done.summary["eval"]["after"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="agentevo-wait-") as scratch:
        first, second = (
            run(Path(scratch) / latency, latency, steps) for latency in ("lognormal", "exponential")
        )

    different = [name for name in first[0] if first[0][name] != second[0].get(name)]
    tokens = sum(len(turn[1]) for turns, _ in first[0].values() for turn in turns)
    summary = {
        "steps": steps,
        "attempts": [len(first[0]), len(second[0])],
        "tokens": tokens,
        "different_attempts": len(different),
        "same_plans": first[1] == second[1],
        "success_after": [first[2], second[2]],
    }
    print(json.dumps(summary))
    same = not different and len(first[0]) == len(second[0]) and summary["same_plans"]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
