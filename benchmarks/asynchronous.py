"""Wall time to the same number of steps, sampling and training in turn against asynchronously, with
tools that take their time.

    .venv/bin/python benchmarks/asynchronous.py    # all of it: about two hours
    .venv/bin/python benchmarks/asynchronous.py --latency lognormal --staleness 2 \\
        --policies mask --seeds 0

The real trainer and engine, one process. A tiny policy crosses a 3x3 frozen lake told in words;
after each answer a tool is waited for: `constant`, `exponential` or `lognormal` (sigma 1) latency
with the same mean. Every run has the same tasks, cold start, learning rate and number of steps;
time counts from the end of the evaluation before the first step to the last step's commit,
evaluations left out.

`async_LATENCY_vs_sync` is time(staleness 0) / time(staleness 2) under the recommended policy
(`mask`), medians over seeds; the others are named async_LATENCY_eta_POLICY. A run in which any
trained token was older than its bound, or whose trained trajectories the audit of its store does
not confirm, is a failure and ends its latency; one whose success, greedy, on 128 held-out tasks,
mean over seeds, is more than 2 points below that in turn is a failure instead of a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from agentevo.agents import EnvironmentAgent, Outcome
from agentevo.api.run import train
from agentevo.config import RunConfig, build_config
from agentevo.observability import LiveView
from agentevo.observability.metrics import read_metrics
from agentevo.rollout.tasks import environment_tasks
from agentevo.runs.orchestration.players import make_environment
from agentevo.types import Message, Task
from figures import Figure, NotComparableError, write_results
from machine import describe_machine

RECIPE: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "context_length": 256},
    },
    "environment": {
        "type": "frozen_lake",
        "size": 3,
        "frozen_probability": 1,
        "slippery": False,
        "view": "words",
        "max_actions": 5,
    },
    "agent": {"format": "plain", "max_turns": 5, "memory": "turn"},
    "sampling": {"max_new_tokens": 3},
    "algorithm": {
        "name": "starpo",
        "entropy_coef": 0.1,
        "entropy_target": 0.7,
        "drop_zero_variance": False,
    },
    "trainer": {
        "steps": 36,
        "groups_per_step": 16,
        "group_size": 8,
        "learning_rate": 3.0e-4,
        "minibatches": 2,
    },
    "cold_start": {
        "episodes": 100,
        "batch_episodes": 8,
        "learning_rate": 2.0e-3,
        "random_action_rate": 0.5,
    },
    "evaluation": {"tasks": 128, "every": 0},
    "checkpoint": {"every": 0},
    "rollout": {"max_attempts": 1024},
    "engine": {"max_running": 512},
    "tracking": {"tensorboard": False, "report": False},
}
MEAN_LATENCY_S = 0.25
SIGMA = 1.0
RECOMMENDED = "mask"
LATENCIES = ("constant", "exponential", "lognormal")
POLICIES = ("wait", "cancel", "mask", "correct")
WITHIN = 0.02
"""Most that the asynchronous runs' mean success may be below the synchronous ones'."""


def latencies(kind: str, seed: str) -> Iterator[float]:
    """Seconds that one attempt's tools take, one after the other; the same for the same attempt in
    every run."""
    rng = random.Random(seed)
    while True:
        if kind == "constant":
            yield MEAN_LATENCY_S
        elif kind == "exponential":
            yield rng.expovariate(1 / MEAN_LATENCY_S)
        else:
            yield rng.lognormvariate(math.log(MEAN_LATENCY_S) - SIGMA**2 / 2, SIGMA)


class SlowTools:
    """The policy of a training attempt, after each of whose answers a tool runs."""

    def __init__(self, policy: Any, seconds: Iterator[float]) -> None:
        self._policy = policy
        self._seconds = seconds

    async def generate(self, messages: Sequence[Message]) -> Any:
        reply = await self._policy.generate(messages)
        await asyncio.sleep(next(self._seconds))
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def configure(folder: Path, seed: int, staleness: int, policy: str) -> RunConfig:
    chosen = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"rollout.staleness={staleness}",
        f"rollout.policy={policy}",
    ]
    if policy == "correct":
        chosen += ["algorithm.importance=token_tis", "algorithm.old_logprobs=recomputed"]
    return build_config(RECIPE, chosen)


def one_run(folder: Path, latency: str, seed: int, staleness: int, policy: str) -> dict[str, float]:
    """Wall seconds, success and what the steps say of their tokens' ages."""
    config = configure(folder, seed, staleness, policy)

    async def play(task: Task, policy: Any) -> Outcome:
        agent = EnvironmentAgent(config.agent, lambda: make_environment(config))
        training = "/train@" in policy.name
        return await agent.run(
            task, SlowTools(policy, latencies(latency, policy.name)) if training else policy
        )

    count = config.trainer.steps * config.trainer.groups_per_step
    kind = RECIPE["environment"]["type"]
    tasks = environment_tasks(kind, seed, "train", 0, count) + environment_tasks(
        kind, seed, "eval", 0, config.evaluation.tasks
    )
    run = train(
        config,
        agent=play,
        tasks=tasks,
        view=LiveView("benchmark", plain=True, stream=io.StringIO()),
    )
    rows = read_metrics(run.dir / "metrics.jsonl")
    steps = [row for row in rows if "training/global_step" in row]
    begun = max(row["time"] or 0.0 for row in rows if row["step"] == 0)

    problems = run.audit().violations
    oldest = max(row.get("staleness/max") or 0.0 for row in steps)
    if problems or oldest > staleness:
        raise NotComparableError(
            f"{folder.name}: oldest token {oldest:g} of {staleness}; {problems[:3]}"
        )

    return {
        "wall_s": (steps[-1]["time"] or 0.0) - begun,
        "success": run.summary["eval"]["after"],
        "oldest": oldest,
        "mean_age": fmean(row.get("staleness/mean") or 0.0 for row in steps),
        "masked": fmean(row.get("staleness/masked") or 0.0 for row in steps),
        "cancelled_tokens": steps[-1].get("sampler/cancelled_tokens") or 0.0,
        "generating_s": sum(row.get("timing_s/gen") or 0.0 for row in steps),
        "training_s": sum(row.get("timing_s/update_actor") or 0.0 for row in steps),
    }


def compare(
    scratch: Path, latency: str, arms: Sequence[tuple[int, str]], seeds: Sequence[int]
) -> tuple[list[Figure], dict[str, str]]:
    """Each (staleness, policy) against staleness 0, runs of a seed one after the other: figures,
    and name -> why it is none."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {arm: [] for arm in [(0, "wait"), *arms]}
    for seed in seeds:
        for staleness, policy in found:
            result = one_run(
                scratch / f"{latency}-{staleness}-{policy}-{seed}", latency, seed, staleness, policy
            )
            found[staleness, policy].append(result)
            print(
                f"    {latency} seed {seed} staleness {staleness} {policy}: {json.dumps(result)}",
                file=sys.stderr,
                flush=True,
            )

    walls = {arm: median(run["wall_s"] for run in runs) for arm, runs in found.items()}
    success = {arm: fmean(run["success"] for run in runs) for arm, runs in found.items()}
    figures = []
    failures = {}
    for staleness, policy in arms:
        recommended = staleness == 2 and policy == RECOMMENDED
        name = (
            f"async_{latency}_vs_sync" if recommended else f"async_{latency}_{staleness}_{policy}"
        )
        raw = {
            "medians": {"sync": walls[0, "wait"], "async": walls[staleness, policy]},
            "unit": "s",
            "seeds": list(seeds),
        }
        raw |= {"success": {"sync": success[0, "wait"], "async": success[staleness, policy]}}
        raw |= {"runs": {"sync": found[0, "wait"], "async": found[staleness, policy]}}
        if success[0, "wait"] - success[staleness, policy] > WITHIN:
            failures[name] = (
                f"success {success[staleness, policy]:.1%}, in turn {success[0, 'wait']:.1%}: "
                f"{json.dumps(raw)}"
            )
            continue

        meaning = (
            f"wall seconds of {RECIPE['trainer']['steps']} steps, in turn and with "
            f"staleness {staleness} ({policy}), {latency} latencies"
        )
        figures.append(Figure(name, walls[0, "wait"] / walls[staleness, policy], meaning, raw))

    return figures, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latency", default=",".join(LATENCIES))
    parser.add_argument("--staleness", default="1,2,4")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/DATE-MACHINE-asynchronous.json",
    )
    given = parser.parse_args()
    seeds = [int(one) for one in given.seeds.split(",")]
    arms = [
        (int(eta), policy)
        for eta in given.staleness.split(",")
        for policy in given.policies.split(",")
    ]
    before = describe_machine()

    figures = []
    failures = {}
    for latency in given.latency.split(","):
        with tempfile.TemporaryDirectory(prefix="agentevo-async-") as scratch:
            try:
                found, not_comparable = compare(Path(scratch), latency, arms, seeds)
            except NotComparableError as error:
                found = []
                not_comparable = {latency: str(error)}

        figures += found
        failures |= not_comparable
        for name, why in not_comparable.items():
            print(f"failed {name}: {why}", file=sys.stderr, flush=True)

        for figure in found:
            print(figure.line(), flush=True)
            print(
                f"    {figure.meaning}: {json.dumps(figure.raw['medians'])} s, success "
                f"{figure.raw['success']}",
                file=sys.stderr,
                flush=True,
            )

    if given.save:
        print(write_results(figures, failures, {}, before, "asynchronous"))

    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
