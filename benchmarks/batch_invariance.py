"""What bit-equal results in any company cost: the engine and whole training runs of this tree over
those of another one, before the engine summed in one order (commit fd19e39).

    git worktree add /tmp/before fd19e39
    .venv/bin/python benchmarks/batch_invariance.py --against /tmp/before

Each tree computes in a process of its own, and the processes take turns: in each round one tree,
then the other, on the same prompts. Prints `ratio batch_invariant_vs_default_CASE`, speed over
speed, so that 0.95 means that 5% are paid; medians of the rounds after one that warms up.

    generate_N    tokens/s of N requests with different prompts of 48 tokens, 64 new ones each
    prefix500_64  the same of 64 requests that share a prompt of 500 tokens
    turns_8       8 conversations of 6 turns, 48 new tokens and 32 completed in each
    train         seconds of a run of two steps of the recipe `frozen_lake`, evaluations left out
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = ("generate_1", "generate_16", "generate_64", "prefix500_64", "turns_8", "train")
NEW_TOKENS = 64


class Worker:
    """One tree's process."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{HERE}"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, case: str, repeat: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([case, repeat]), file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def work() -> None:
    """A worker: answers each `[case, repeat]` with the seconds that it took."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    engine: Any = None
    for line in sys.stdin:
        case, repeat = json.loads(line)
        if case == "train":
            seconds = train(repeat)
        else:
            if engine is None:
                from ours import load, make_engine, model_folder

                engine = make_engine(load(model_folder()))
            seconds = generate(engine, case, repeat)

        print(json.dumps(seconds), file=answers, flush=True)


def generate(engine: Any, case: str, repeat: int) -> float:
    from generate import random_prompts
    from ours import time_generate

    kind, _, count = case.rpartition("_")
    if kind == "turns":
        return converse(engine, int(count), repeat)

    if kind == "prefix500":
        prompts = random_prompts(1, 500, repeat) * int(count)
    else:
        prompts = random_prompts(int(count), 48, repeat)

    return time_generate(engine, prompts, NEW_TOKENS, 1.0, seed=repeat)[0]


def converse(engine: Any, count: int, repeat: int) -> float:
    from agentevo.types import SamplingParams

    async def one(index: int) -> None:
        numbers = random.Random(1000 * repeat + index)
        context = []
        for turn in range(6):
            context += [numbers.randrange(100, 40_000) for _ in range(48)]
            params = SamplingParams(max_new_tokens=32, seed=turn)
            found = await engine.generate(context, params, session=f"{index}", deadline_s=600)
            context += found.ids

        await engine.release(f"{index}")

    async def together() -> None:
        await asyncio.gather(*(one(index) for index in range(count)))

    started = time.perf_counter()
    asyncio.run(together())
    return time.perf_counter() - started


def train(repeat: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            "trainer.steps=2",
            "evaluation.every=0",
            "cold_start.episodes=32",
            "evaluation.tasks=1",
        ]
        keys += ["tracking.report=false", f"run.seed={repeat}", f"run.dir={folder}/run"]
        started = time.perf_counter()
        command = [sys.executable, "-m", "agentevo", "train", "frozen_lake", *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the other tree")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/...json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return

    from figures import Figure, write_results
    from machine import describe_machine

    before = describe_machine()
    workers = [Worker(HERE.parent), Worker(options.against)]
    figures = []
    for case in options.only.split(","):
        taken: list[list[float]] = [[], []]
        for repeat in range(options.repeats + 1):
            for worker, seconds in zip(workers, taken, strict=True):
                seconds.append(worker.seconds(case, repeat))

        ours, theirs = (seconds[1:] for seconds in taken)
        medians = {"batch_invariant": median(ours), "default": median(theirs)}
        raw = {
            "unit": "s",
            "medians": medians,
            "repeats": {"batch_invariant": ours, "default": theirs},
        }
        name = f"batch_invariant_vs_default_{case}"
        figures.append(Figure(name, median(theirs) / median(ours), __doc__ or "", raw))
        print(figures[-1].line(), json.dumps(raw["repeats"]), flush=True)

    for worker in workers:
        worker.end()

    if options.save:
        print(write_results(figures, {}, {}, before, "batch_invariance"))


if __name__ == "__main__":
    main()
