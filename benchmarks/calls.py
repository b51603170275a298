"""What recording calls costs: the same small run with and without it, in turns, each in a process
of its own, and the time of one call taken apart.

    python benchmarks/calls.py --pairs 3

Prints, for each run, wall and CPU seconds, and at last the ratio of the smallest of each (with over
without). On a machine that others use as well only the CPU seconds mean something. The metrics of
all runs must be equal, timings apart: recording changes no number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentevo.store import open_store
from agentevo.store.call_log import AttemptCalls, CallLog, call_log

TIMINGS = ("timing_s/", "perf/", "engine/tokens_per_s", "engine/busy_s", "trainer/mfu", "memory")


def numbers(folder: Path) -> str:
    """The run's metrics without what a clock decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def is_timing(key: str) -> bool:
        timed = key.startswith(TIMINGS) or key in ("time", "wall_s")
        return timed or "per_s" in key or "mfu" in key

    return json.dumps([{k: v for k, v in sorted(row.items()) if not is_timing(k)} for row in rows])


def run_once(recipe: str, overrides: list[str], record: bool) -> tuple[float, float, str, int]:
    """(wall seconds, CPU seconds, numbers, calls) of a run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [recipe, *overrides, f"run.dir={run_dir}", "tracking.report=false"]
        begun = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        mode = "--recorded" if record else "--unrecorded"
        command = [sys.executable, __file__, mode, *words]
        subprocess.run(command, check=True, capture_output=True)
        wall = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        async def count() -> int:
            async with await open_store(f"sqlite:///{run_dir / 'store.sqlite'}") as store:
                return await store.num_calls()

        return wall, cpu, numbers(run_dir), asyncio.run(count())


def train(words: list[str], record: bool) -> None:
    if not record:
        CallLog.admit = lambda self, call: False  # type: ignore[method-assign]
    from agentevo.cli.main import main

    sys.exit(main(["train", *words]))


async def take_apart(num_calls: int = 4000) -> None:
    """CPU microseconds of one call: in the attempt's own thread, and in the log's."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.sqlite"
        async with await open_store(url) as store, call_log(url) as log:
            calls = AttemptCalls(log, "train-84/train@2#6")
            own = 0.0
            for _ in range(num_calls // 500):
                begun = time.thread_time()
                for _ in range(500):
                    with calls.call("policy", "generate", prompt_tokens=500) as call:
                        call.note(turn=3, completions=1, completion_tokens=12, version=3)
                own += time.thread_time() - begun
                await asyncio.sleep(0.6)

            records = [stored.call async for stored in store.calls()]
            begun = time.process_time()
            for first in range(0, len(records), 500):
                await store.write_calls(records[first : first + 500])

            written = time.process_time() - begun

    print(
        f"a call: {1e6 * own / num_calls:.1f} us in its attempt's thread, "
        f"{1e6 * written / len(records):.1f} us to be written in another"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--recipe", default="coins")
    parser.add_argument("overrides", nargs="*", default=["trainer.steps=2", "evaluation.tasks=16"])
    arguments = parser.parse_args()
    asyncio.run(take_apart())

    results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    seen = set()
    for _ in range(arguments.pairs):
        for record in (True, False):
            wall, cpu, found, count = run_once(arguments.recipe, arguments.overrides, record)
            results[record].append((wall, cpu))
            seen.add(found)
            name = "with" if record else "without"
            print(f"{name:8} {wall:7.2f} s wall  {cpu:7.2f} s CPU  {count:6} calls", flush=True)

    for place, name in enumerate(("wall", "CPU")):
        least = {record: min(one[place] for one in results[record]) for record in results}
        print(f"ratio of the least {name} seconds: {least[True] / least[False]:.4f}")

    print("numbers equal" if len(seen) == 1 else f"NUMBERS DIFFER: {len(seen)} kinds")


if __name__ == "__main__":
    if sys.argv[1:2] in (["--recorded"], ["--unrecorded"]):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        train(sys.argv[2:], sys.argv[1] == "--recorded")
    main()
