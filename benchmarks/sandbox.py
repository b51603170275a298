"""What a sandbox costs: its start and a call in it, beside a bare Python, in turns in one process.

    python benchmarks/sandbox.py --rounds 20

The bare start is `python -I -S -c pass`; the bare call is one line to and fro over pipes with
a Python that runs `eval`. Prints medians in milliseconds and, per kind, their ratio to the bare
ones; `execute` is a program in an open sandbox, beside the bare start.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from agentevo.environments.sandbox import Sandboxes
from agentevo.environments.sandbox.launch import python_program
from agentevo.environments.sandbox.open_sandbox import problem_of
from agentevo.environments.sandbox.section import SandboxSection

ECHO = "import sys\nfor line in sys.stdin:\n    print(eval(line), flush=True)"
CALLS = 20


def bare_start() -> float:
    begun = time.perf_counter()
    subprocess.run([python_program(), "-I", "-S", "-c", "pass"], check=True)
    return time.perf_counter() - begun


def bare_calls() -> list[float]:
    with subprocess.Popen(
        [python_program(), "-I", "-S", "-c", ECHO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as bare:
        assert bare.stdin is not None
        assert bare.stdout is not None

        times = []
        for _ in range(CALLS + 1):
            begun = time.perf_counter()
            bare.stdin.write("6 * 7\n")
            bare.stdin.flush()
            assert bare.stdout.readline() == "42\n"
            times.append(time.perf_counter() - begun)

        bare.stdin.close()

    return times[1:]


async def sandbox_times(kind: str) -> dict[str, list[float]]:
    sandboxes = Sandboxes(SandboxSection(type=kind))
    times: dict[str, list[float]] = defaultdict(list)
    begun = time.perf_counter()
    async with sandboxes.open() as sandbox:
        times["start"].append(time.perf_counter() - begun)
        for number in range(CALLS + 1):
            begun = time.perf_counter()
            assert (await sandbox.run("6 * 7")).value == "42"
            if number:
                times["call"].append(time.perf_counter() - begun)

        begun = time.perf_counter()
        assert (await sandbox.execute(["python", "-c", "pass"])).exit_code == 0

        times["execute"].append(time.perf_counter() - begun)
        begun = time.perf_counter()

    times["close"].append(time.perf_counter() - begun)
    return times


async def measured(kinds: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        found["bare"]["start"].append(bare_start())
        found["bare"]["call"] += bare_calls()
        for kind in kinds:
            for name, times in (await sandbox_times(kind)).items():
                found[kind][name] += times

    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds

    problems = {
        kind: await problem_of(kind, SandboxSection(type=kind))
        for kind in ("bubblewrap", "landlock", "none")
    }
    for kind, problem in problems.items():
        if problem:
            print(f"{kind} can't be used: {problem}", file=sys.stderr)

    found = await measured([kind for kind in problems if not problems[kind]], rounds)
    bare = {name: statistics.median(times) for name, times in found["bare"].items()}
    bare["execute"] = bare["start"]
    for kind, by_name in found.items():
        for name, times in by_name.items():
            middle = statistics.median(times)
            ratio = f"{middle / bare[name]:8.1f} x bare" if name in bare else ""
            print(f"{kind:<11} {name:<8} {1000 * middle:8.2f} ms {ratio}")


if __name__ == "__main__":
    asyncio.run(main())
